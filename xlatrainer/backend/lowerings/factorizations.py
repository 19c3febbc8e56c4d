"""Householder reflectors, least squares, polar factors, square roots and eigenvalues of general matrices."""

import jax
import jax.numpy as jnp
import torch
from jax import lax

from xlatrainer.backend.lowerings.checks import holds
from xlatrainer.backend.lowerings.registry import lowering


def _adjoint(matrix):
    return jnp.conj(matrix.swapaxes(-1, -2))


_DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def _is_matrix(self, *rest, **options):
    """Where torch has no meta kernel that would complain, the CPU does."""
    return self.dtype in _DTYPES and self.dim() >= 2


@lowering("geqrf", supports=_is_matrix)
def geqrf(self):
    """LAPACK's form of QR: R above, the Householder vectors below the diagonal, and their factors."""
    reflectors, factors = jnp.linalg.qr(self, mode="raw")
    return reflectors.swapaxes(-1, -2), factors


@lowering("ormqr")
def ormqr(self, input2, input3, left=True, transpose=False):
    return lax.linalg.ormqr(self, input2, input3, left=left, transpose=transpose)


# least squares


def _can_solve(self, b, rcond=None, *, driver=None):
    """Two drivers give residuals only where the rank, which depends on the data, is full; the CPU tells of mistakes."""
    if not _is_matrix(self) or self.dtype != b.dtype or not 0 < b.dim() <= self.dim():
        return False
    vector = b.dim() < self.dim()
    fits = b.shape == self.shape[:-1] if vector else b.shape[-2] == self.shape[-2]
    return fits and (driver in (None, "gels", "gelsy") or self.shape[-2] <= self.shape[-1])


@lowering("linalg_lstsq", static=("rcond",), supports=_can_solve)
def linalg_lstsq(self, b, rcond=None, *, driver=None):
    """By singular values for each driver; `gels` trusts that the rank is full, the others count what is above rcond."""
    driver = driver or "gelsy"
    rows, columns = self.shape[-2:]
    vector = b.ndim < self.ndim
    rhs = b[..., None] if vector else b
    left, values, right = jnp.linalg.svd(self, full_matrices=False)
    epsilon = jnp.finfo(values.dtype).eps
    rcond = epsilon * max(rows, columns) if rcond is None else rcond
    rcond = epsilon if rcond < 0 else rcond
    counted = values > rcond * jnp.max(values, -1, keepdims=True, initial=0)
    if driver == "gels":
        counted = jnp.ones_like(counted)
    inverse = jnp.where(counted, 1 / jnp.where(counted, values, 1), 0)[..., None]
    solution = _adjoint(right) @ (inverse * (_adjoint(left) @ rhs))
    none = jnp.zeros(0, values.dtype)
    residuals = none
    if driver == "gels" and rows > columns:
        residuals = jnp.sum(jnp.abs(rhs - self @ solution) ** 2, -2)
    rank = jnp.zeros(0, jnp.int64) if driver == "gels" else jnp.sum(counted, -1, dtype=jnp.int64)
    return (
        solution[..., 0] if vector else solution,
        residuals,
        rank,
        values if driver in ("gelsd", "gelss") else none,
    )


# polar factors and square roots


@lowering("linalg_polar")
def linalg_polar(A):
    left, values, right = jnp.linalg.svd(A, full_matrices=False)
    return left @ right, _adjoint(right) @ (values[..., None] * right)


@lowering("linalg_matrix_sqrth")
def linalg_matrix_sqrth(self):
    """Of a positive definite matrix, of which only the lower triangle is read; lower eigenvalues count as 0."""
    vectors, values = lax.linalg.eigh(self, lower=True, symmetrize_input=False)
    return (vectors * jnp.sqrt(jnp.maximum(values, 0))[..., None, :].astype(self.dtype)) @ _adjoint(vectors)


# general eigenvalues


def _has_eigenvalues(self):
    return jax.default_backend() in ("cpu", "gpu")


def _refuse_infinite(matrix):
    holds(jnp.isfinite(matrix), RuntimeError, "torch.linalg.eig: input tensor should not contain infs or NaNs")


@lowering("linalg_eig", supports=_has_eigenvalues)
def linalg_eig(self):
    _refuse_infinite(self)
    values, vectors = lax.linalg.eig(self, compute_left_eigenvectors=False)
    return values, vectors


@lowering("_linalg_eigvals", supports=_has_eigenvalues)
def linalg_eigvals(self):
    return lax.linalg.eig(self, compute_left_eigenvectors=False, compute_right_eigenvectors=False)[0]
