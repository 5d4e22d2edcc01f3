"""The criterion of variance-based compression in its two forms, and the speed-up its authors predict.

A component of the mean gradient g over a batch of B samples is sent when it is unambiguous: alpha' standard errors squared,

    (alpha'/B) Var[g] < g^2,           Var taken over the batch, biased (1/B) or unbiased (1/(B-1)).

Written with raw moments the variance disappears, which is the form that accumulates over steps:

    g^2 > alpha * sum over samples z of (g_z/B)^2,      alpha = alpha' B / (B + alpha')        for the biased variance,
                                                        alpha = alpha' B / (B - 1 + alpha')    for the unbiased one.

Always alpha < B: by Cauchy-Schwarz nothing could ever be sent in one step otherwise.

Communication: a dense ring all-reduce of N words takes 2 (p-1)/p N word times on p workers, a pipelined ring all-gather of p
messages that are c times smaller takes p N / c. The ratio is 2 (p-1) c / p^2, so compression pays from c = p^2 / (2 (p-1)),
about p/2.

Citation: Tsuzuku, Imachi, Akiba, Variance-based Gradient Compression for Efficient Distributed Deep Learning (arXiv
1802.06058). The factors in terms of B are derived here; the library's parameter is alpha, of the second form.
"""

from __future__ import annotations

from tersegrad.theory.arguments import Array, require_positive, require_whole, vectorised


@vectorised
def alpha_from_prime(alpha_prime: Array, batch: Array, *, biased: bool = True) -> Array:
    """Raw-moment threshold alpha that equals the variance threshold ``alpha_prime`` at this batch size.

    >>> alpha_from_prime(1.0, 64, biased=False)
    1.0
    """
    require_positive("alpha_prime", alpha_prime)
    require_whole("batch", batch, 1 if biased else 2)
    return alpha_prime * batch / (batch + alpha_prime if biased else batch - 1 + alpha_prime)


@vectorised
def prime_from_alpha(alpha: Array, batch: Array, *, biased: bool = True) -> Array:
    """Variance threshold alpha' that equals the raw-moment threshold ``alpha`` < batch.

    >>> round(prime_from_alpha(1.5, 64), 4)
    1.536
    """
    require_positive("alpha", alpha)
    require_whole("batch", batch, 1 if biased else 2)
    require_positive("batch - alpha", batch - alpha)
    return alpha * (batch if biased else batch - 1) / (batch - alpha)


@vectorised
def largest_alpha(batch: Array) -> Array:
    """Supremum B of the thresholds at which one step can send anything; alpha itself must stay below it."""
    require_whole("batch", batch, 1)
    return batch


@vectorised
def all_gather_speedup(workers: Array, ratio: Array) -> Array:
    """Predicted communication speed-up 2 (p-1) c / p^2 over a dense ring all-reduce, at ``ratio`` c = 32 / bits per coordinate.

    >>> round(all_gather_speedup(8, 383.6), 1)
    83.9
    """
    require_whole("workers", workers, 2)
    require_positive("ratio", ratio)
    return 2 * (workers - 1) * ratio / workers**2


@vectorised
def break_even_ratio(workers: Array) -> Array:
    """Ratio p^2 / (2 (p-1)) from which an all-gather of messages beats a dense ring all-reduce.

    >>> break_even_ratio(2)
    2.0
    """
    require_whole("workers", workers, 2)
    return workers**2 / (2 * (workers - 1))
