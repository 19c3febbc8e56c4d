"""Bessel and Airy functions.

Rational and Chebyshev approximations of the Cephes library (S. Moshier, netlib.org/cephes: j0.c, j1.c, k0.c, k1.c,
airy.c), with the regions and constants that torch uses (ATen/native/Math.h), so that both round alike.
"""

import math

import jax
import jax.numpy as jnp

from xlatrainer.backend.lowerings.registry import pointwise


def _table(text):
    return tuple(float(number) for number in text.split())


_J0_PP = _table("""
    0.0007969367292973471 0.08283523921074408 1.239533716464143 5.447250030587687 8.74716500199817
    5.303240382353949 1.0
""")
_J0_PQ = _table("""
    0.0009244088105588637 0.08562884743544745 1.2535274390105895 5.470977403304171 8.761908832370695
    5.306052882353947 1.0
""")
_J0_QP = _table("""
    -0.011366383889846916 -1.2825271867050931 -19.553954425773597 -93.20601521237683 -177.68116798048806
    -147.07750515495118 -51.41053267665993 -6.050143506007285
""")
_J0_QQ = _table("""
    64.3178256118178 856.4300259769806 3882.4018360540163 7240.467741956525 5930.727011873169 2062.0933166032783
    242.0057402402914
""")
_J0_RP = _table("-4794432209.782018 1956174919465.5657 -249248344360967.72 9708622510473064.0")
_J0_RQ = _table("""
    499.563147152651 173785.4016763747 48440965.83399621 11185553704.535683 2112775201154.892 310518229857422.56
    3.1812195594320496e+16 1.7108629408104315e+18
""")
_J1_PP = _table("""
    0.0007621256162081731 0.07313970569409176 1.1271960812968493 5.112079511468076 8.424045901417724
    5.214515986823615 1.0
""")
_J1_PQ = _table("""
    0.0005713231280725487 0.06884559087544954 1.105142326340617 5.073863861286015 8.399855543276042
    5.209828486823619 1.0
""")
_J1_QP = _table("""
    0.05108625947501766 4.982138729512334 75.82382841325453 366.7796093601508 710.8563049989261
    597.4896124006136 211.68875710057213 25.207020585802372
""")
_J1_QQ = _table("""
    74.23732770356752 1056.4488603826283 4986.410583376536 9562.318924047562 7997.041604473507
    2826.1927851763908 336.0936078106983
""")
_J1_RP = _table("-899971225.7055594 452228297998.19403 -72749424522181.83 3682957328638529.0")
_J1_RQ = _table("""
    620.8364781180543 256987.25675774884 83514679.14319493 22151159547.97925 4749141220799.914 784369607876235.9
    8.952223361846274e+16 5.322786203326801e+18
""")
_Y0_P = _table("""
    15592.436785523574 -14663929.59039716 5435264770.518765 -982136065717.9115 87590639439536.7
    -3466283033847297.0 4.4273326857256984e+16 -1.8495080043698668e+16
""")
_Y0_Q = _table("""
    1041.2835366425984 626107.330137135 268919633.39381415 86400248710.3935 20297961275010.555
    3171577528429750.5 2.5059625617265306e+17
""")
_Y1_P = _table("""
    1263204747.9017804 -647355876379.1603 114509511541823.73 -8127702555013251.0 2.024394757135949e+17
    -7.788771962659501e+17
""")
_Y1_Q = _table("""
    594.3015923461282 235564.09294306856 73481194.44597217 18760131610.870617 3882312774962.3857
    620557727146953.8 6.871410873553005e+16 3.9727060811656064e+18
""")
_K0_A = _table("""
    1.374465435613523e-16 4.25981614279661e-14 1.0349695257633842e-11 1.904516377220209e-09
    2.5347910790261494e-07 2.286212103119452e-05 0.001264615411446926 0.0359799365153615 0.3442898999246285
    -0.5353273932339028
""")
_K0_B = _table("""
    5.300433772686263e-18 -1.6475804301524212e-17 5.2103915050390274e-17 -1.678231096805412e-16
    5.512055978524319e-16 -1.848593377343779e-15 6.3400764774050706e-15 -2.2275133269916698e-14
    8.032890775363575e-14 -2.9800969231727303e-13 1.140340588208475e-12 -4.514597883373944e-12
    1.8559491149547177e-11 -7.957489244477107e-11 3.577397281400301e-10 -1.69753450938906e-09
    8.574034017414225e-09 -4.660489897687948e-08 2.766813639445015e-07 -1.8317555227191195e-06
    1.39498137188765e-05 -0.00012849549581627802 0.0015698838857300533 -0.0314481013119645 2.4403030820659555
""")
_K1_A = _table("""
    -7.023863479386288e-18 -2.427449850519366e-15 -6.666901694199329e-13 -1.4114883926335278e-10
    -2.213387630734726e-08 -2.4334061415659684e-06 -0.0001730288957513052 -0.006975723859639864
    -0.12261118082265715 -0.3531559607765449 1.5253002273389478
""")
_K1_B = _table("""
    -5.756744483665017e-18 1.7940508731475592e-17 -5.689462558442859e-17 1.838093544366639e-16
    -6.057047248373319e-16 2.038703165624334e-15 -7.019837090418314e-15 2.4771544244813043e-14
    -8.976705182324994e-14 3.3484196660784293e-13 -1.2891739609510289e-12 5.13963967348173e-12
    -2.1299678384275683e-11 9.218315187605006e-11 -4.1903547593418965e-10 2.015049755197033e-09
    -1.0345762465678097e-08 5.7410841254500495e-08 -3.5019606030878126e-07 2.406484947837217e-06
    -1.936197974166083e-05 0.00019521551847135162 -0.002857816859622779 0.10392373657681724 2.7206261904844427
""")
_AIRY_AN = _table("""
    0.346538101525629 12.007595273964581 76.27960536152345 168.08922493463058 159.75639135016442
    70.53609068404442 14.026469116338967 1.0
""")
_AIRY_AD = _table("""
    0.5675945326387702 14.75625625848472 84.51389701414746 177.31808814540045 164.2346928715297
    71.47784008255756 14.095913560783403 1.0
""")
_AIRY_AFN = _table("""
    -0.1316963234183318 -0.6264565444319123 -0.6931580360369335 -0.2797799815451191 -0.04919001326095003
    -0.004062659235948854 -0.0001592764962392621 -2.776491081552329e-06 -1.6778769848911465e-08
""")
_AIRY_AFD = _table("""
    13.356042070655324 32.682503279522464 26.736704094149957 9.187074029072596 1.4752914677166642
    0.11568717379518804 0.004402916416152112 7.547203482874142e-05 4.5185009297058035e-07
""")
_AIRY_AGN = _table("""
    0.01973399320916857 0.39110302961568827 1.0657989759959559 0.9391692298166502 0.35146565610554764
    0.06338889196289255 0.005858041130483885 0.000282851600836737 6.98793669997261e-06 8.117892395543892e-08
    3.415517847659236e-10
""")
_AIRY_AGD = _table("""
    9.30892908077442 19.835292871831214 15.564662893286462 5.476860694229755 0.9542936116189619
    0.08645808263523921 0.004126565238242226 0.00010125908511650914 1.1716673321441352e-06 4.9183457006293e-09
""")


def _polynomial(x, coefficients):
    """Horner's rule, the highest power first."""
    result = jnp.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result = result * x + coefficient
    return result


def _ratio(x, above, below):
    return _polynomial(x, above) / _polynomial(x, below)


def _chebyshev(x, coefficients):
    """Clenshaw's recurrence for a sum of Chebyshev polynomials of `x / 2`, the highest first (Cephes' chbevl)."""
    before, last, total = 0.0, 0.0, jnp.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        before, last = last, total
        total = x * last - before + coefficient
    return 0.5 * (total - before)


# Bessel functions of the first and second kind


def _waves(x, phase, tables):
    """Amplitude, cosine and sine part, and angle of the expansion beyond 5."""
    pp, pq, qp, qq = tables
    z = 25.0 / (x * x)
    return _ratio(z, pp, pq), 5.0 / x * _ratio(z, qp, qq), x - phase


_J0_TABLES = (_J0_PP, _J0_PQ, _J0_QP, _J0_QQ)
_J1_TABLES = (_J1_PP, _J1_PQ, _J1_QP, _J1_QQ)
_J0_PHASE, _J1_PHASE = 0.25 * math.pi, 0.75 * math.pi
_ROOT = math.sqrt(2 / math.pi)


@pointwise("special_bessel_j0", to="float")
def special_bessel_j0(self):
    x = jnp.abs(self)
    square = x * x
    near = (square - 5.78318596294678452118) * (square - 30.4712623436620863991) * _ratio(square, _J0_RP, _J0_RQ)
    near = jnp.where(x < 1e-5, 1 - square / 4, near)
    even, odd, angle = _waves(x, _J0_PHASE, _J0_TABLES)
    far = (even * jnp.cos(angle) - odd * jnp.sin(angle)) * _ROOT / jnp.sqrt(x)
    return jnp.where(x <= 5, near, far)


@pointwise("special_bessel_j1", to="float")
def special_bessel_j1(self):
    x = jnp.abs(self)
    square = x * x
    near = _ratio(square, _J1_RP, _J1_RQ) * x * (square - 14.6819706421238932572) * (square - 49.2184563216946036703)
    even, odd, angle = _waves(x, _J1_PHASE, _J1_TABLES)
    far = (even * jnp.cos(angle) - odd * jnp.sin(angle)) * _ROOT / jnp.sqrt(x)
    result = jnp.where(x <= 5, near, far)
    return jnp.where(self < 0, -result, result)


def _second_kind(x, near, waves):
    """A function that is -inf at 0 and undefined below."""
    even, odd, angle = waves
    far = (even * jnp.sin(angle) + odd * jnp.cos(angle)) * _ROOT / jnp.sqrt(x)
    result = jnp.where(x <= 5, near, far)
    return jnp.where(x == 0, -jnp.inf, jnp.where(x < 0, jnp.nan, result))


@pointwise("special_bessel_y0", to="float")
def special_bessel_y0(self):
    near = _ratio(self * self, _Y0_P, _Y0_Q) + 2 / math.pi * jnp.log(self) * special_bessel_j0(self)
    return _second_kind(self, near, _waves(self, _J0_PHASE, _J0_TABLES))


@pointwise("special_bessel_y1", to="float")
def special_bessel_y1(self):
    logarithmic = special_bessel_j1(self) * jnp.log(self) - 1 / self
    near = self * _ratio(self * self, _Y1_P, _Y1_Q) + 2 / math.pi * logarithmic
    return _second_kind(self, near, _waves(self, _J1_PHASE, _J1_TABLES))


@pointwise("special_spherical_bessel_j0", to="float")
def special_spherical_bessel_j0(self):
    taylor = [(-1) ** k / math.factorial(2 * k + 1) for k in reversed(range(7))]
    near = _polynomial(self * self, taylor)
    result = jnp.where(jnp.abs(self) < 0.5, near, jnp.sin(self) / self)
    return jnp.where(jnp.isinf(self), 0, result)


# modified Bessel functions

pointwise("special_modified_bessel_i0", to="float")(jax.scipy.special.i0)
pointwise("special_modified_bessel_i1", to="float")(jax.scipy.special.i1)


def _modified_second_kind(x, near, tail, scaled):
    """K(x), or exp(x) K(x): infinite at 0 and undefined below."""
    far = _chebyshev(8.0 / x - 2.0, tail) / jnp.sqrt(x)
    result = jnp.where(x <= 2, near * jnp.exp(x), far) if scaled else jnp.where(x <= 2, near, jnp.exp(-x) * far)
    return jnp.where(x == 0, jnp.inf, jnp.where(x < 0, jnp.nan, result))


def _k0(x, scaled):
    near = _chebyshev(x * x - 2.0, _K0_A) - jnp.log(0.5 * x) * jax.scipy.special.i0(x)
    return _modified_second_kind(x, near, _K0_B, scaled)


def _k1(x, scaled):
    near = jnp.log(0.5 * x) * jax.scipy.special.i1(x) + _chebyshev(x * x - 2.0, _K1_A) / x
    return _modified_second_kind(x, near, _K1_B, scaled)


@pointwise("special_modified_bessel_k0", to="float")
def special_modified_bessel_k0(self):
    return _k0(self, scaled=False)


@pointwise("special_modified_bessel_k1", to="float")
def special_modified_bessel_k1(self):
    return _k1(self, scaled=False)


@pointwise("special_scaled_modified_bessel_k0", to="float")
def special_scaled_modified_bessel_k0(x):
    return _k0(x, scaled=True)


@pointwise("special_scaled_modified_bessel_k1", to="float")
def special_scaled_modified_bessel_k1(x):
    return _k1(x, scaled=True)


# the Airy function


def _airy_left(x):
    """Below -2.09: waves of slowly falling height."""
    zeta = -2.0 * x * jnp.sqrt(-x) / 3.0
    z = 1.0 / zeta
    square = z * z
    angle = zeta + 0.25 * math.pi
    cosine = jnp.cos(angle) * (z * _ratio(square, _AIRY_AGN, _AIRY_AGD))
    sine = jnp.sin(angle) * (1.0 + square * _ratio(square, _AIRY_AFN, _AIRY_AFD))
    return (sine - cosine) / math.sqrt(math.pi) / jnp.sqrt(jnp.sqrt(-x))


def _airy_middle(x):
    """The power series, of which 14 terms are exact to float64 where it is used, up to 2.09."""
    cube = x * x * x
    f, g, even, odd = jnp.ones_like(x), x, jnp.ones_like(x), x
    for k in range(3, 45, 3):
        even = even * cube / (k * (k - 1))
        odd = odd * cube / (k * (k + 1))
        f, g = f + even, g + odd
    return 0.355028053887817239260 * f - 0.258819403792806798405 * g


def _airy_right(x):
    zeta = 2.0 * x * jnp.sqrt(x) / 3.0
    ratio = _ratio(1.0 / zeta, _AIRY_AN, _AIRY_AD)
    return ratio / math.sqrt(math.pi) / (2.0 * jnp.sqrt(jnp.sqrt(x)) * jnp.exp(zeta))


@pointwise("special_airy_ai", to="float")
def special_airy_ai(x):
    result = jnp.where(x >= 2.09, _airy_right(x), _airy_middle(x))
    result = jnp.where(x < -2.09, _airy_left(x), result)
    result = jnp.where(x > 103.892, 0, result)
    return jnp.where(jnp.isinf(x), jnp.nan, result)
