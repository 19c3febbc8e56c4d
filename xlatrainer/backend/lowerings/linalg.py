"""Matrix products, factorisations and solvers.

Products of half types are summed in float32 and rounded once. How exact float32 products are on hardware that can trade
that for speed is torch's own setting, `torch.set_float32_matmul_precision`: "highest", "high" or "medium", which is
XLA's default. A program belongs to the setting that it was compiled with.
"""

from functools import partial

import jax
import jax.numpy as jnp
import torch
from jax import lax

from xlatrainer.backend.dtypes import to_numpy
from xlatrainer.backend.lowerings.checks import holds, index_in_range
from xlatrainer.backend.lowerings.fusion import materialized
from xlatrainer.backend.lowerings.partitioning import partitioned
from xlatrainer.backend.lowerings.registry import lowering

_PRECISIONS = {"highest": lax.Precision.HIGHEST, "high": lax.Precision.HIGH, "medium": lax.Precision.DEFAULT}


def dot_precision():
    """How exact float32 products are: torch's setting."""
    return _PRECISIONS[torch.get_float32_matmul_precision()]


def matmul(a, b, dtype=None):
    """`a @ b`, accumulated in float32 for half types and given in the dtype of `a`, or in `dtype`."""
    dtype = dtype or a.dtype
    if a.dtype == jnp.bool_:
        return jnp.matmul(a.astype(jnp.int32), b.astype(jnp.int32)) > 0
    if a.ndim == 2 and b.ndim == 2:
        return partitioned(partial(_product, dtype=dtype), "ij,jk->ik", "ijk", a, b)
    return _product(a, b, dtype)


def _product(a, b, dtype):
    wide = jnp.float32 if a.dtype in (jnp.float16, jnp.bfloat16) else None
    a = _row_major(a, b)
    return jnp.matmul(a, b, precision=dot_precision(), preferred_element_type=wide).astype(dtype)


def _row_major(a, b):
    """`a` so that on the CPU a transposed left operand is written out first, where that is little beside the product.

    XLA's CPU backend gives such products to a slower library. Weight gradients of 1024 rows, with 256 and 1024 columns,
    went from 125 to 160 and from 176 to 186 Gflop/s; `benchmarks/matmul.py` repeats it.
    """
    large = a.ndim == 2 and b.ndim == 2 and min(*a.shape, b.shape[1]) >= 128
    return materialized(a) if large else a


def _scaled(array, factor):
    """`factor * array`; the factor 1 that a schema has as its default costs nothing."""
    return array if isinstance(factor, int) and factor == 1 else array * jnp.asarray(factor).astype(array.dtype)


def _plus_product(self, a, b, beta, alpha):
    """`beta * self + alpha * (a @ b)`; with beta 0 even a NaN in `self` does not count."""
    half = a.dtype in (jnp.float16, jnp.bfloat16)
    product = _scaled(matmul(a, b, jnp.float32 if half else None), alpha)
    if beta == 0:
        return product.astype(a.dtype)
    return (product + _scaled(self.astype(product.dtype), beta)).astype(a.dtype)


@lowering("mm", "bmm", "mv", "dot")
def mm(self, mat2):
    return matmul(self, mat2)


@lowering("vdot")
def vdot(self, other):
    return matmul(jnp.conj(self), other)


@lowering("mm.dtype", "bmm.dtype")
def mm_dtype(self, mat2, out_dtype):
    return matmul(self, mat2, to_numpy(out_dtype))


@lowering("_int_mm")
def int_mm(self, mat2):
    return jnp.matmul(self, mat2, preferred_element_type=jnp.int32)


@lowering("addmm", "addmv", static=("beta",))
def addmm(self, mat1, mat2, *, beta=1, alpha=1):
    return _plus_product(self, mat1, mat2, beta, alpha)


@lowering("baddbmm", static=("beta",))
def baddbmm(self, batch1, batch2, *, beta=1, alpha=1):
    return _plus_product(self, batch1, batch2, beta, alpha)


@lowering("addbmm", static=("beta",))
def addbmm(self, batch1, batch2, *, beta=1, alpha=1):
    """The sum over the batch is one longer sum of products."""
    batch, rows, inner = batch1.shape
    left = batch1.swapaxes(0, 1).reshape(rows, batch * inner)
    return _plus_product(self, left, batch2.reshape(batch * inner, batch2.shape[2]), beta, alpha)


@lowering("addr", static=("beta",), takes_specs=True)
def addr(self, vec1, vec2, *, beta=1, alpha=1, out_specs):
    dtype = to_numpy(out_specs[0].dtype)
    alpha = getattr(alpha, "array", alpha)
    product = vec1.astype(dtype)[:, None] * vec2.astype(dtype)
    if dtype == jnp.bool_:
        return product & (jnp.asarray(alpha) != 0) | (self & (beta != 0))
    product = _scaled(product, alpha)
    return jnp.broadcast_to(product if beta == 0 else product + _scaled(self.astype(dtype), beta), product.shape)


@lowering("linalg_cross")
def linalg_cross(self, other, *, dim=-1):
    return jnp.cross(*jnp.broadcast_arrays(self, other), axis=dim)


# triangular


def _solve_triangular(a, b, *, upper, left=True, transpose=False, adjoint=False, unit=False):
    return lax.linalg.triangular_solve(
        a, b, left_side=left, lower=not upper, transpose_a=transpose or adjoint, conjugate_a=adjoint, unit_diagonal=unit
    )


def _batched(*matrices):
    """Matrices with their batch dims broadcast."""
    batch = jnp.broadcast_shapes(*(matrix.shape[:-2] for matrix in matrices))
    return [jnp.broadcast_to(matrix, batch + matrix.shape[-2:]) for matrix in matrices]


@lowering("linalg_solve_triangular")
def linalg_solve_triangular(self, B, *, upper, left=True, unitriangular=False):
    self, B = _batched(self, B)
    return _solve_triangular(self, B, upper=upper, left=left, unit=unitriangular)


@lowering("triangular_solve")
def triangular_solve(self, A, upper=True, transpose=False, unitriangular=False):
    self, A = _batched(self, A)
    return _solve_triangular(A, self, upper=upper, transpose=transpose, unit=unitriangular), A


# Cholesky


def _first_bad(diagonal):
    """`info` of LAPACK: the number of the first pivot that failed, 0 if none did."""
    bad = ~jnp.isfinite(diagonal) | (diagonal == 0)
    first = jnp.argmax(bad, -1) + 1 if diagonal.shape[-1] else jnp.zeros(diagonal.shape[:-1], jnp.int32)
    return jnp.where(jnp.any(bad, -1), first, 0).astype(jnp.int32)


def _succeeded(info, check, message, kind=torch.linalg.LinAlgError):
    """With `check`, what LAPACK's `info` says is an error; `{value}` in the message becomes the first that is not 0."""
    if check and info.size:
        holds(info == 0, kind, message, value=info.reshape(-1)[jnp.argmax(info.reshape(-1) != 0)])


def _finite(matrix, message, kind=torch.linalg.LinAlgError):
    holds(jnp.isfinite(matrix), kind, message)


def _diagonal(matrix):
    return jnp.diagonal(matrix, axis1=-2, axis2=-1)


def _adjoint(matrix):
    return jnp.conj(matrix.swapaxes(-1, -2))


@lowering("linalg_cholesky_ex")
def linalg_cholesky_ex(self, *, upper=False, check_errors=False):
    lower = jnp.tril(lax.linalg.cholesky(_adjoint(self) if upper else self, symmetrize_input=False))
    info = _first_bad(_diagonal(lower).real)
    _succeeded(
        info,
        check_errors,
        "linalg.cholesky_ex: The factorization could not be completed because the input is not positive-definite (the "
        "leading minor of order {value} is not positive-definite)",
    )
    return _adjoint(lower) if upper else lower, info


@lowering("_cholesky_solve_helper")
def cholesky_solve_helper(self, A, upper):
    lower = _adjoint(A) if upper else A
    inner = _solve_triangular(lower, self, upper=False)
    return _solve_triangular(lower, inner, upper=False, adjoint=True)


@lowering("cholesky_inverse")
def cholesky_inverse(self, upper=False):
    identity = jnp.broadcast_to(jnp.eye(self.shape[-1], dtype=self.dtype), self.shape)
    return cholesky_solve_helper(identity, self, upper)


# LU


def _lu(matrix):
    """Factors in one matrix, LAPACK's pivots (counted from 1) and the permutation they make."""
    factors, pivots, permutation = lax.linalg.lu(matrix)
    return factors, pivots.astype(jnp.int32) + 1, permutation


def _permutation(pivots, size):
    """The row order that LAPACK's pivots stand for."""
    return lax.linalg.lu_pivots_to_permutation(pivots - 1, size)


def _rows_in_order(matrix, permutation):
    return jnp.take_along_axis(matrix, permutation[..., None], axis=-2)


def _lu_solve(factors, permutation, rhs):
    rhs = _rows_in_order(rhs, jnp.broadcast_to(permutation, (*rhs.shape[:-2], permutation.shape[-1])))
    inner = _solve_triangular(factors, rhs, upper=False, unit=True)
    return _solve_triangular(factors, inner, upper=True)


@lowering("linalg_lu_factor_ex")
def linalg_lu_factor_ex(A, *, pivot=True, check_errors=False):
    factors, pivots, _ = _lu(A)
    info = _first_bad(_diagonal(factors))
    message = (
        "torch.linalg.lu_factor_ex: U[{value},{value}] is zero and using it on lu_solve would result in a division by "
        "zero"
    )
    _succeeded(info, check_errors, message, RuntimeError)
    return factors, pivots, info


def _is_vector(A, B):
    """torch's rule for a batch of vectors on the right-hand side."""
    return B.ndim == 1 or (A.ndim - 1 == B.ndim and B.shape == A.shape[:-1])


@lowering("_linalg_solve_ex")
def linalg_solve_ex(A, B, *, left=True, check_errors=False):
    vector = _is_vector(A, B)
    rhs = B[..., None] if vector else B
    factors, pivots, permutation = _lu(A if left else A.swapaxes(-1, -2))
    wide, rhs = _batched(factors, rhs if left else rhs.swapaxes(-1, -2))
    result = _lu_solve(wide, permutation, rhs)
    result = result if left else result.swapaxes(-1, -2)
    info = _first_bad(_diagonal(factors))
    _succeeded(info, check_errors, "torch.linalg.solve_ex: The solver failed because the input matrix is singular")
    return result[..., 0] if vector else result, factors, pivots, info


@lowering("linalg_inv_ex")
def linalg_inv_ex(A, *, check_errors=False):
    factors, _, permutation = _lu(A)
    identity = jnp.broadcast_to(jnp.eye(A.shape[-1], dtype=A.dtype), A.shape)
    info = _first_bad(_diagonal(factors))
    message = (
        "linalg.inv_ex: The diagonal element {value} is zero, the inversion could not be completed because the input "
        "matrix is singular"
    )
    _succeeded(info, check_errors, message)
    return _lu_solve(factors, permutation, identity), info


@lowering("linalg_lu_solve")
def linalg_lu_solve(LU, pivots, B, *, left=True, adjoint=False):
    permutation = _permutation(pivots, LU.shape[-1])
    LU, rhs = _batched(LU, B if left else _adjoint(B))
    if adjoint == (not left):
        result = _lu_solve(LU, permutation, rhs)
    else:
        inner = _solve_triangular(LU, rhs, upper=True, adjoint=True)
        inner = _solve_triangular(LU, inner, upper=False, adjoint=True, unit=True)
        order = jnp.argsort(permutation, axis=-1)
        result = _rows_in_order(inner, jnp.broadcast_to(order, (*inner.shape[:-2], order.shape[-1])))
    return result if left else _adjoint(result)


def _unpacked(factors):
    """L with ones on its diagonal and U."""
    rows, columns = factors.shape[-2:]
    size = min(rows, columns)
    lower = jnp.tril(factors[..., :, :size], -1) + jnp.eye(rows, size, dtype=factors.dtype)
    return lower, jnp.triu(factors[..., :size, :])


def _permutation_matrix(permutation, dtype):
    """P with P L U = A."""
    return jax.nn.one_hot(permutation, permutation.shape[-1], dtype=dtype, axis=-2)


@lowering("linalg_lu")
def linalg_lu(A, *, pivot=True):
    factors, _, permutation = _lu(A)
    return (_permutation_matrix(permutation, A.dtype), *_unpacked(factors))


@lowering("lu_unpack")
def lu_unpack(LU_data, LU_pivots, unpack_data=True, unpack_pivots=True):
    empty = jnp.zeros(0, LU_data.dtype)
    lower, upper = _unpacked(LU_data) if unpack_data else (empty, empty)
    if not unpack_pivots:
        return empty, lower, upper
    rows = LU_data.shape[-2]
    message = f"pivots passed to lu_unpack must be between 1 and LU.size(-2) inclusive, that is {rows}"
    index_in_range(LU_pivots - 1, rows, RuntimeError, message)
    return _permutation_matrix(_permutation(LU_pivots, LU_data.shape[-2]), LU_data.dtype), lower, upper


def _pivot_sign(pivots):
    """The determinant of the permutation: -1 for every row that moved."""
    moved = jnp.sum(pivots != jnp.arange(1, pivots.shape[-1] + 1), -1)
    return 1 - 2 * (moved % 2)


def _has_known_layout(A):
    return A.is_contiguous() or A.is_complex()


def _lu_for_gradient(A):
    """What torch's own gradients of determinants expect of a contiguous matrix of real numbers: LU of its transpose."""
    return _lu(A if jnp.iscomplexobj(A) else A.swapaxes(-1, -2))


@lowering("_linalg_det", supports=_has_known_layout)
def linalg_det(A):
    factors, pivots, _ = _lu_for_gradient(A)
    return jnp.prod(_diagonal(factors), -1) * _pivot_sign(pivots).astype(A.dtype), factors, pivots


@lowering("_linalg_slogdet", supports=_has_known_layout)
def linalg_slogdet(A):
    factors, pivots, _ = _lu_for_gradient(A)
    diagonal = _diagonal(factors)
    sign = jnp.prod(jnp.sign(diagonal), -1) * _pivot_sign(pivots).astype(A.dtype)
    return sign, jnp.sum(jnp.log(jnp.abs(diagonal)), -1), factors, pivots


# orthogonal factors


@lowering("linalg_qr")
def linalg_qr(A, mode="reduced"):
    if mode == "r":
        return jnp.zeros(0, A.dtype), jnp.linalg.qr(A, mode="r")
    return tuple(jnp.linalg.qr(A, mode=mode))


@lowering("linalg_householder_product")
def linalg_householder_product(input, tau):
    return lax.linalg.householder_product(input, tau)


@lowering("_linalg_eigh")
def linalg_eigh(A, UPLO="L", compute_v=True):
    _finite(
        jnp.tril(A) if UPLO == "L" else jnp.triu(A),
        "linalg.eigh: The algorithm failed to converge because the input matrix is ill-conditioned or has too many "
        "repeated eigenvalues: it contains infs or NaNs",
    )
    vectors, values = lax.linalg.eigh(A if UPLO == "L" else _adjoint(A), lower=True, symmetrize_input=False)
    return values, vectors if compute_v else jnp.zeros(0, A.dtype)


@lowering("_linalg_svd")
def linalg_svd(A, full_matrices=False, compute_uv=True, *, driver=None):
    _finite(A, "linalg.svd: The algorithm failed to converge because the input matrix contained non-finite values")
    if not compute_uv:
        return jnp.zeros(0, A.dtype), jnp.linalg.svd(A, compute_uv=False), jnp.zeros(0, A.dtype)
    return tuple(jnp.linalg.svd(A, full_matrices=full_matrices))


@lowering("linalg_matrix_exp")
def linalg_matrix_exp(self):
    if self.dtype in (jnp.float16, jnp.bfloat16):
        return jax.scipy.linalg.expm(self.astype(jnp.float32)).astype(self.dtype)
    return jax.scipy.linalg.expm(self)


# distances


@lowering("_cdist_forward", static=("p",))
def cdist_forward(x1, x2, p, compute_mode):
    return _distance(x1[..., :, None, :] - x2[..., None, :, :], p)


@lowering("_pdist_forward", static=("p",))
def pdist_forward(self, p=2.0):
    rows, columns = jnp.triu_indices(self.shape[0], 1)
    return _distance(self[rows] - self[columns], p)


def _distance(difference, p):
    """The p-norm over the last dim."""
    size = jnp.abs(difference)
    if p == 0:
        return jnp.sum((size != 0).astype(size.dtype), -1)
    if p == jnp.inf:
        return jnp.max(size, -1, initial=0)
    if p == 2:
        return jnp.sqrt(jnp.sum(size * size, -1))
    return jnp.sum(size, -1) if p == 1 else jnp.sum(size**p, -1) ** (1 / p)


@lowering("_cdist_backward", static=("p",))
def cdist_backward(grad, x1, x2, p, cdist):
    pulled = jnp.sum(_distance_gradient(grad, x1[..., :, None, :] - x2[..., None, :, :], p, cdist), -2)
    return pulled if pulled.size else jnp.zeros_like(x1)  # torch does not broadcast batches that hold nothing


@lowering("_pdist_backward", static=("p",))
def pdist_backward(grad, self, p, pdist):
    rows, columns = jnp.triu_indices(self.shape[0], 1)
    pulled = _distance_gradient(grad, self[rows] - self[columns], p, pdist)
    return jnp.zeros_like(self).at[rows].add(pulled).at[columns].add(-pulled)


def _distance_gradient(grad, difference, p, distance):
    """The gradient of the p-norm; 0 where the distance is, as torch has it."""
    grad, distance = grad[..., None], distance[..., None]
    if p == 0:
        return jnp.zeros_like(difference)
    if p == 1:
        return grad * jnp.sign(difference)
    if p == jnp.inf:
        return grad * jnp.sign(difference) * (jnp.abs(difference) == distance)
    safe = jnp.where(distance == 0, 1, distance)
    size = jnp.abs(difference)
    slope = difference / safe if p == 2 else jnp.sign(difference) * (size / safe) ** (p - 1)
    return jnp.where((distance == 0) | (size == 0), 0, grad * slope)
