"""Special functions beside the everyday ones of `pointwise`: gamma and zeta functions and orthogonal polynomials.

Where JAX has the function, what is added here is torch's answer at the edges of its domain.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from xlatrainer.backend.lowerings.registry import pointwise

pointwise("special_erfcx", to="float")(jax.scipy.special.erfcx)


@pointwise("special_xlog1py", "special_xlog1py.other_scalar", "special_xlog1py.self_scalar", to="float")
def special_xlog1py(self, other):
    product = jnp.where(self == 0, 0, self * jnp.log1p(other))
    return jnp.where(jnp.isnan(other), jnp.nan, product)


# the gamma function's relatives


_MACHINE_EPSILON = 2.0**-53
# (2 k)! / B_2k of the Euler-Maclaurin sum, k from 1
_ZETA_TERMS = (
    *(12.0, -720.0, 30240.0, -1209600.0, 47900160.0, -1.8924375803183791606e9, 7.47242496e10, -2.950130727918164224e12),
    *(1.1646782814350067249e14, -4.5979787224074726105e15, 1.8152105401943546773e17, -7.1661652561756670113e18),
)


def _zeta(x, q):
    """Hurwitz' zeta function (Cephes' zeta.c) in float64, as in torch; JAX's is wrong for the `q` below 0 of torch."""
    dtype = jnp.result_type(x, q)
    x, q = jnp.broadcast_arrays(jnp.asarray(x, jnp.float64), jnp.asarray(q, jnp.float64))
    negative_integer = (q <= 0) & (q == jnp.floor(q))
    pole = (x == 1) | (~(x < 1) & negative_integer)
    undefined = (x < 1) | ((q <= 0) & (x != jnp.floor(x)))
    total, _, argument, last, exact = lax.while_loop(
        lambda state: jnp.any(_zeta_wants_a_term(state)),
        lambda state: _zeta_term(x, state),
        (jnp.power(q, -x), jnp.asarray(0, jnp.int32), q, jnp.zeros_like(q), pole | undefined),
    )
    rest = total + last * argument / (x - 1) - 0.5 * last
    factor, k, done = jnp.ones_like(x), 0, exact
    for divisor in _ZETA_TERMS:
        factor, last = factor * (x + k), last / argument
        term = factor * last / divisor
        rest = jnp.where(done, rest, rest + term)
        done |= jnp.abs(term / rest) < _MACHINE_EPSILON
        factor, last = factor * (x + (k + 1)), last / argument
        k += 2
    result = jnp.where(exact, total, rest)
    return jnp.where(pole, jnp.inf, jnp.where(undefined, jnp.nan, result)).astype(dtype)


def _zeta_wants_a_term(state):
    _, count, argument, _, exact = state
    return ~exact & ((count < 9) | (argument <= 9))


def _zeta_term(x, state):
    """One more term of the plain sum, where one is wanted; the sum is exact where the term does not count."""
    total, count, argument, last, exact = state
    wanted = _zeta_wants_a_term(state)
    following = argument + 1
    term = jnp.power(following, -x)
    longer = total + term
    exact |= wanted & (jnp.abs(term) < _MACHINE_EPSILON * jnp.abs(longer))
    pick = functools.partial(jnp.where, wanted)
    return pick(longer, total), count + 1, pick(following, argument), pick(term, last), exact


@pointwise("special_zeta", "special_zeta.other_scalar", "special_zeta.self_scalar", to="float")
def special_zeta(self, other):
    return _zeta(self, other)


@pointwise("polygamma", to="float", static=("n",))
def polygamma(n, self):
    if n == 0:
        return jnp.where(self == 0, jnp.copysign(jnp.inf, -self), jax.scipy.special.digamma(self))
    if n == 1:
        return _trigamma(self)
    order = jnp.full_like(self, n + 1)
    factorial = math.factorial(n) if n <= 170 else math.inf  # beyond, no float64
    return jnp.asarray((1.0 if n % 2 else -1.0) * factorial, self.dtype) * _zeta(order, self)


def _trigamma(x):
    """By reflection below 1/2, six steps up and the asymptotic series, as in torch's Math.h."""
    reflected = x < 0.5
    sine = jnp.sin(math.pi * x)
    result = jnp.where(reflected, -(math.pi**2) / (sine * sine), 0)
    x = jnp.where(reflected, 1 - x, x)
    for _ in range(6):
        result = result + 1 / (x * x)
        x = x + 1
    inverse = 1 / (x * x)
    result = result + (1 + 1 / (2 * x) + inverse * (1 / 6 - inverse * (1 / 30 - inverse * (1 / 42)))) / x
    return jnp.where(reflected, -result, result)


@pointwise("mvlgamma", to="float", static=("p",))
def mvlgamma(self, p):
    return sum(lax.lgamma(self - k / 2) for k in range(p)) + p * (p - 1) / 4 * math.log(math.pi)


def _incomplete_gamma(function, a, x, low, high):
    """`low` and `high`: the value for x far below and far above a. In float64, since XLA's series lose digits."""
    a, x = jnp.broadcast_arrays(a, x)
    inside = (a > 0) & (x > 0) & jnp.isfinite(a) & jnp.isfinite(x)
    wide = [jnp.where(inside, array, 1).astype(jnp.float64) for array in (a, x)]
    edge = jnp.where(jnp.isinf(x), high, jnp.nan)
    edge = jnp.where(jnp.isinf(a), jnp.where(jnp.isinf(x), jnp.nan, low), edge)
    edge = jnp.where(x == 0, low, edge)
    edge = jnp.where(a == 0, jnp.where(x > 0, high, jnp.nan), edge)
    edge = jnp.where((a < 0) | (x < 0), jnp.nan, edge)
    return jnp.where(inside, function(*wide), edge)


@pointwise("igamma", to="float")
def igamma(self, other):
    return _incomplete_gamma(lax.igamma, self, other, 0, 1)


@pointwise("igammac", to="float")
def igammac(self, other):
    return _incomplete_gamma(lax.igammac, self, other, 1, 0)


# orthogonal polynomials, each element with a degree of its own


def _degree(n):
    """The degree as int64; what is no number counts as negative, for which the polynomials are 0."""
    return jnp.where(jnp.isfinite(n), n, -1).astype(jnp.int64)


def _recurrence(first, second, step, n):
    """The polynomial of degree `n` out of those of degrees 0 and 1 and `step(k, last, before)`, that of degree k."""
    first, second, n = jnp.broadcast_arrays(first, second, n)

    def is_open(state):
        k, _, last = state
        return jnp.any((k <= n) & ~jnp.isnan(last))

    def advance(state):
        k, before, last = state
        wanted = k <= n
        following = step(k.astype(last.dtype), last, before)
        return k + 1, jnp.where(wanted, last, before), jnp.where(wanted, following, last)

    _, _, last = lax.while_loop(is_open, advance, (jnp.asarray(2, jnp.int64), first, second))
    return jnp.where(n < 0, 0, jnp.where(n == 0, first, last))


def _family(name, function):
    pointwise(f"special_{name}", f"special_{name}.n_scalar", f"special_{name}.x_scalar", to="float")(function)


def _chebyshev(x, n, offset, threshold, trigonometric, ends):
    """The four kinds differ in the polynomial of degree 1; inside (-1, 1) high degrees have a trigonometric form.

    Source: NIST Digital Library of Mathematical Functions, 18.5.1-18.5.4 and table 18.9.1.
    """
    n = _degree(n)
    x, n = jnp.broadcast_arrays(x, n)
    by_angle = (n > threshold) & (jnp.abs(x) < 1)
    at_end = jnp.abs(x) == 1
    second = x if offset is None else x + x + offset
    stepped = jnp.where(by_angle | at_end, jnp.minimum(n, 0), n)
    result = _recurrence(jnp.ones_like(x), second, lambda k, last, before: (x + x) * last - before, stepped)
    degree = n.astype(x.dtype)
    result = jnp.where(by_angle, trigonometric(degree, jnp.arccos(jnp.where(by_angle, x, 0))), result)
    right, left = ends(degree)
    sign = jnp.where(n % 2 == 0, 1, -1).astype(x.dtype)
    return jnp.where(at_end & (n >= 0), jnp.where(x > 0, right, sign * left), result)


_CHEBYSHEV_KINDS = {
    "t": (None, 6, 6, lambda n, t: jnp.cos(n * t), lambda n: (1, 1)),
    "u": (0, 8, 6, lambda n, t: jnp.sin((n + 1) * t) / jnp.sin(t), lambda n: (n + 1, n + 1)),
    "v": (-1, 8, 6, lambda n, t: jnp.cos((n + 0.5) * t) / jnp.cos(t / 2), lambda n: (1, n + n + 1)),
    "w": (1, 8, 4, lambda n, t: jnp.sin((n + 0.5) * t) / jnp.sin(t / 2), lambda n: (n + n + 1, 1)),
}


def _register_chebyshev(kind):
    offset, threshold, shifted_threshold, *forms = _CHEBYSHEV_KINDS[kind]

    def plain(x, n):
        return _chebyshev(x, n, offset, threshold, *forms)

    def shifted(x, n):
        return _chebyshev(x + x - 1, n, offset, shifted_threshold, *forms)

    _family(f"chebyshev_polynomial_{kind}", plain)
    _family(f"shifted_chebyshev_polynomial_{kind}", shifted)


for _kind in _CHEBYSHEV_KINDS:
    _register_chebyshev(_kind)


def _hermite(x, n, scale):
    """The physicists' polynomials with scale 2, the probabilists' with 1; torch gives up at its limits."""
    n = _degree(n)
    limit = 512 if x.dtype == jnp.float64 else 128
    result = _recurrence(
        jnp.ones_like(x),
        scale * x,
        lambda k, last, before: (scale * x) * last - scale * (k - 1) * before,
        jnp.where(n > limit, 0, n),
    )
    return jnp.where(n > limit, jnp.nan, result)


def hermite_polynomial_h(x, n):
    return _hermite(x, n, 2)


def hermite_polynomial_he(x, n):
    return _hermite(x, n, 1)


def laguerre_polynomial_l(x, n):
    def step(k, last, before):
        return ((k + k - 2 + (1 - x)) * last - (k - 1) * before) / k

    n = _degree(n)
    result = _recurrence(jnp.ones_like(x), 1 - x, step, n)
    return jnp.where((x == 0) & (n >= 0), 1, result)


def legendre_polynomial_p(x, n):
    def step(k, last, before):
        return ((k + k - 1) * x * last - (k - 1) * before) / k

    n = _degree(n)
    ends = jnp.where((x > 0) | (n % 2 == 0), 1, -1).astype(x.dtype)
    return jnp.where((jnp.abs(x) == 1) & (n >= 0), ends, _recurrence(jnp.ones_like(x), x, step, n))


for _function in (hermite_polynomial_h, hermite_polynomial_he, laguerre_polynomial_l, legendre_polynomial_p):
    _family(_function.__name__, _function)
