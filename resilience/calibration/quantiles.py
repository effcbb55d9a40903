"""What are the quantiles of a few distributions?  Plain functions without a library, because fits also run in a job."""

from __future__ import annotations

import math


def poisson_at_most(k: int, mean: float) -> float:
    """Return the probability of k or fewer events where `mean` are expected."""
    return sum(math.exp(i * math.log(mean) - mean - math.lgamma(i + 1)) for i in range(k + 1)) if mean > 0 else 1.0


def normal(q: float) -> float:
    """Return the q-quantile of the standard normal distribution, within 5e-4.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.2.23."""
    if q > 0.5:
        return -normal(1.0 - q)
    t = math.sqrt(-2.0 * math.log(q))
    top = 2.515517 + t * (0.802853 + t * 0.010328)
    return top / (1.0 + t * (1.432788 + t * (0.189269 + t * 0.001308))) - t


def chi2(q: float, degrees: float) -> float:
    """Return the q-quantile of the chi-squared distribution, within 1 % from 8 degrees on.

    Source: Wilson and Hilferty (1931), The distribution of chi-square."""
    a = 2.0 / (9.0 * degrees)
    return degrees * float(1.0 - a + normal(q) * math.sqrt(a)) ** 3


def student(q: float, degrees: int) -> float:
    """Return the q-quantile of Student's t distribution: exact for 1 and 2 degrees, else within 1 %.

    Source: Cornish-Fisher expansion, Abramowitz and Stegun 26.7.5."""
    if degrees == 1:
        return math.tan(math.pi * (q - 0.5))
    if degrees == 2:
        return (2.0 * q - 1.0) / math.sqrt(2.0 * q * (1.0 - q))
    z, v = normal(q), degrees
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )
