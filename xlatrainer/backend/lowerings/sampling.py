"""Gamma, Dirichlet, Poisson, binomial and multinomial samples, and the gradients that samples have.

What is drawn by rejection is drawn for a whole array at once, again and again until all of it is accepted: a few
rounds, since nearly every candidate is. Counts are computed in float64, as torch does: they are differences of large
numbers.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy import special

from xlatrainer.backend.dtypes import compute_dtype, from_numpy
from xlatrainer.backend.lowerings.checks import holds
from xlatrainer.backend.lowerings.random import open_unit
from xlatrainer.backend.lowerings.registry import lowering


def _floating(dtype):
    return compute_dtype(from_numpy(dtype))


def _until_accepted(key, propose, first, wanted):
    """Samples by rejection.

    Args:
        key: the key of all rounds.
        propose: makes candidates, and which of them are accepted, from a key.
        first: what is returned where nothing is wanted.
        wanted: bools, false where a parameter has no samples.
    """

    def unfinished(state):
        return jnp.any(state[2])

    def draw(state):
        number, samples, waiting = state
        candidates, accepted = propose(jax.random.fold_in(key, number))
        return number + 1, jnp.where(waiting & accepted, candidates, samples), waiting & ~accepted

    return lax.while_loop(unfinished, draw, (jnp.uint32(0), first, wanted))[1]


# gamma and Dirichlet


def _gamma_parts(key, alpha):
    """Samples of `Gamma(alpha + 1)` where `alpha` is below 1, else of `Gamma(alpha)`; and the logarithms to add for it.

    Source: Marsaglia and Tsang, A simple method for generating gamma variables (2000).
    """
    draws, boost = jax.random.split(key)
    low = alpha < 1
    d = jnp.where(low, alpha + 1, alpha) - 1 / 3
    step = 1 / jnp.sqrt(9 * d)

    def propose(key):
        normal, uniform = jax.random.split(key)
        x = jax.random.normal(normal, alpha.shape, alpha.dtype)
        t = step * x
        inside = t > -1
        t = jnp.where(inside, t, 0)
        # d - d v + d log v for v = (1 + t)**3, without the difference of large numbers
        margin = 3 * d * (jnp.log1p(t) - t - t * t - t**3 / 3)
        accepted = jnp.log(open_unit(uniform, alpha.shape, alpha.dtype)) < x * x / 2 + margin
        return d * (1 + t) ** 3, inside & accepted

    samples = _until_accepted(draws, propose, jnp.full_like(alpha, jnp.nan), alpha >= 0)
    logs = jnp.where(low, jnp.log(open_unit(boost, alpha.shape, alpha.dtype)) / alpha, 0)
    return samples, logs


@lowering("_standard_gamma", random=True)
def standard_gamma(self, generator=None, *, key):
    samples, logs = _gamma_parts(key, self.astype(_floating(self.dtype)))
    return jnp.maximum((samples * jnp.exp(logs)).astype(self.dtype), jnp.finfo(self.dtype).tiny)


@lowering("_standard_gamma_grad")
def standard_gamma_grad(self, output):
    dtype = _floating(self.dtype)
    return lax.random_gamma_grad(self.astype(dtype), output.astype(dtype)).astype(self.dtype)


@lowering("_sample_dirichlet", random=True)
def sample_dirichlet(self, generator=None, *, key):
    """By logarithms: all gamma samples of a row may be too small for the dtype."""
    samples, logs = _gamma_parts(key, self.astype(_floating(self.dtype)))
    shares = jax.nn.softmax(jnp.log(samples) + logs, -1)
    limits = jnp.finfo(self.dtype)
    return jnp.clip(shares.astype(self.dtype), limits.tiny, jnp.asarray(1 - limits.epsneg, self.dtype))


_FRACTION_STEPS = 400  # enough in float64 for parameters up to 10**4; it ends when nothing changes any more


def _beta_fraction(a, b, x):
    """The continued fraction of the incomplete beta function, `I_x(a, b) = x**a (1 - x)**b / (a B(a, b)) * fraction`.

    Source: NIST Digital Library of Mathematical Functions, 8.17.22, from front to back (Lentz).
    """
    tiny = 1e-30

    def away_from_zero(value):
        return jnp.where(jnp.abs(value) < tiny, tiny, value)

    def step(state):
        number, fraction, c, d, _ = state
        m = number.astype(a.dtype)
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        before = fraction
        for term in (even, odd):
            d = 1 / away_from_zero(1 + term * d)
            c = away_from_zero(1 + term / c)
            fraction = fraction * c * d
        return number + 1, fraction, c, d, jnp.abs(fraction - before) > 1e-15 * jnp.abs(fraction)

    def unfinished(state):
        return jnp.any(state[4]) & (state[0] < _FRACTION_STEPS)

    d = 1 / away_from_zero(1 - (a + b) * x / (a + 1))
    start = (jnp.int32(1), d, jnp.ones_like(x), d, jnp.ones(x.shape, bool))
    return lax.while_loop(unfinished, step, start)[1]


@lowering("_dirichlet_grad")
def dirichlet_grad(x, alpha, total):
    """The derivative of a component by its parameter, from the distribution function F of Beta(alpha, total - alpha).

    It is `-(dF / d alpha) / (dF / dx) / (1 - x)`. F is computed by its continued fraction, of which forward-mode
    differentiation gives the derivative; beyond the mean by that of the complement, which converges there.
    """
    dtype = x.dtype
    x, a, total = jnp.broadcast_arrays(*(array.astype(jnp.float64) for array in (x, alpha, total)))
    b = total - a
    complement = x > (a + 1) / (total + 2)
    ones = jnp.ones_like(x)

    def fraction(a):
        first, second = jnp.where(complement, b, a), jnp.where(complement, a, b)
        return _beta_fraction(first, second, jnp.where(complement, 1 - x, x))

    value, slope = jax.jvp(fraction, (a,), (ones,))
    logarithm = jnp.log(x) - special.digamma(a) + special.digamma(total)
    below = -(x / a) * (value * (logarithm - 1 / a) + slope)
    above = (x / b) * (value * logarithm + slope)
    return jnp.where(complement, above, below).astype(dtype)


# counts


def _by_inversion(uniform, first, ratio, limit):
    """The smallest count at which the distribution function reaches `uniform`.

    Args:
        uniform: in (0, 1).
        first: the probability of 0.
        ratio: gives the probability of a count over that of the one before it.
        limit: the largest count there is.
    """

    def unfinished(state):
        return jnp.any(state[3])

    def step(state):
        count, probability, cumulated, waiting = state
        count = jnp.where(waiting, count + 1, count)
        probability = probability * ratio(count)
        total = cumulated + probability
        # where nothing is added any more the sum will not get there
        waiting &= (total < uniform) & (count < limit) & (total > cumulated)
        return count, probability, total, waiting

    start = (jnp.zeros_like(uniform), first, first, (first < uniform) & (limit > 0))
    return lax.while_loop(unfinished, step, start)[0]


def _transformed(key, center, spread, a, b, tail, log_mass):
    """A candidate of Hörmann's transformed rejection, and whether it is accepted.

    Sources: W. Hörmann, The transformed rejection method for generating Poisson random variables (1993), and The
    generation of binomial random variates (1993), whose hats differ in `a`, `b`, `tail` (v_r) and `spread` (alpha).
    """
    first, second = jax.random.split(key)
    u = open_unit(first, center.shape, center.dtype) - 0.5
    v = open_unit(second, center.shape, center.dtype)
    distance = 0.5 - jnp.abs(u)
    count = jnp.floor((2 * a / distance + b) * u + center)
    surely = (distance >= 0.07) & (v <= tail)
    hat = jnp.log(v * spread / (a / (distance * distance) + b))
    return count, surely | ((count >= 0) & (hat <= log_mass(jnp.maximum(count, 0))))


def _poisson(key, rate):
    small_key, large_key = jax.random.split(key)
    small = rate < 10
    low = jnp.where(small, rate, 1)
    few = _by_inversion(open_unit(small_key, rate.shape, rate.dtype), jnp.exp(-low), lambda k: low / k, jnp.inf)
    high = jnp.where(small, 10, rate)
    b = 0.931 + 2.53 * jnp.sqrt(high)
    a = -0.059 + 0.02483 * b
    spread = 1.1239 + 1.1328 / (b - 3.4)
    tail = 0.9277 - 3.6224 / (b - 2)

    def log_mass(count):
        return count * jnp.log(high) - high - lax.lgamma(count + 1)

    def propose(key):
        return _transformed(key, high + 0.43, spread, a, b, tail, log_mass)

    many = _until_accepted(large_key, propose, jnp.zeros_like(rate), (rate >= 10) & (rate < jnp.inf))
    return jnp.where(small, few, many)


@lowering("poisson", random=True)
def poisson(self, generator=None, *, key):
    rate = self.astype(jnp.float64)
    holds(rate >= 0, RuntimeError, "invalid Poisson rate, expected rate to be non-negative")
    return _poisson(key, rate).astype(self.dtype)


def _binomial(key, count, chance):
    """For a chance of at most a half."""
    small_key, large_key = jax.random.split(key)
    mean = count * chance
    small = ~(mean >= 10)
    odds = chance / (1 - chance)
    trials = jnp.where(small, count, 0)
    few = _by_inversion(
        open_unit(small_key, count.shape, count.dtype),
        jnp.exp(trials * jnp.log1p(-chance)),
        lambda k: (trials - k + 1) / k * odds,
        trials,
    )
    n, p = jnp.where(small, 40, count), jnp.where(small, 0.5, chance)
    odds = p / (1 - p)
    deviation = jnp.sqrt(n * p * (1 - p))
    b = 1.15 + 2.53 * deviation
    a = -0.0873 + 0.0248 * b + 0.01 * p
    mode = jnp.floor((n + 1) * p)

    def log_mass(k):
        """Relative to the mode."""
        inside = jnp.minimum(k, n)
        ways = [lax.lgamma(m + 1) + lax.lgamma(n - m + 1) for m in (mode, inside)]
        return jnp.where(k <= n, ways[0] - ways[1] + (inside - mode) * jnp.log(odds), -jnp.inf)

    def propose(key):
        spread = (2.83 + 5.1 / b) * deviation
        samples, accepted = _transformed(key, n * p + 0.5, spread, a, b, 0.92 - 4.2 / b, log_mass)
        return samples, accepted & (samples >= 0) & (samples <= n)

    many = _until_accepted(large_key, propose, jnp.zeros_like(count), ~small)
    return jnp.where(small, few, many)


@lowering("binomial", random=True)
def binomial(count, prob, generator=None, *, key):
    dtype = count.dtype
    count, prob = jnp.broadcast_arrays(jnp.floor(count.astype(jnp.float64)), prob.astype(jnp.float64))
    valid = (count >= 0) & (prob >= 0) & (prob <= 1) & (count < jnp.inf)
    count, prob = jnp.where(valid, count, 0), jnp.where(valid, prob, 0)
    rare = jnp.minimum(prob, 1 - prob)
    successes = _binomial(key, count, rare)
    return jnp.where(valid, jnp.where(prob > 0.5, count - successes, successes), jnp.nan).astype(dtype)


# categories


@lowering("multinomial", random=True)
def multinomial(self, num_samples, replacement=False, *, generator=None, key):
    weights = self.astype(jnp.float64 if self.dtype == jnp.float64 else jnp.float32)
    valid = (weights >= 0) & (weights < jnp.inf)
    holds(valid, RuntimeError, "probability tensor contains either `inf`, `nan` or element < 0")
    sums = jnp.sum(weights, -1)
    holds(sums > 0, RuntimeError, "invalid multinomial distribution (sum of probabilities <= 0)")
    if replacement and num_samples > 1:
        return _with_replacement(key, weights, num_samples)
    # The first of independent exponential clocks with these rates, then the second, ...
    clocks = jnp.log(weights) - jnp.log(-jnp.log(open_unit(key, weights.shape, weights.dtype)))
    if num_samples == 1:
        return jnp.argmax(clocks, -1, keepdims=True).astype(jnp.int64)
    return lax.top_k(clocks, num_samples)[1].astype(jnp.int64)


def _with_replacement(key, weights, num_samples):
    """By inversion of the distribution function, summed in float64 lest rare categories vanish."""
    rows = weights.reshape(-1, weights.shape[-1]).astype(jnp.float64)
    sums = jnp.cumsum(rows, -1)
    places = open_unit(key, (rows.shape[0], num_samples), jnp.float64) * sums[:, -1:]
    found = jax.vmap(lambda row, place: jnp.searchsorted(row, place, side="right"))(sums, places)
    last = jnp.argmax(sums >= sums[:, -1:], -1)  # of those with any weight
    chosen = jnp.minimum(found, last[:, None])
    return chosen.reshape(*weights.shape[:-1], num_samples).astype(jnp.int64)
