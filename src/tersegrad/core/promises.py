"""Guarantees of the parts of a vector, joined."""

from __future__ import annotations

from collections.abc import Sequence

from tersegrad.core.protocol import Guarantee


def worst(promises: Sequence[Guarantee]) -> Guarantee:
    """What holds for a vector whose parts are sent with these guarantees.

    >>> print(worst([Guarantee("contractive", 0.5, True), Guarantee("contractive", 0.9, True)]))
    C(alpha=0.9)
    >>> print(worst([Guarantee("unbiased", 3.0), Guarantee("contractive", 0.0, True)]))
    U(omega=3)
    >>> print(worst([Guarantee("unbiased", 3.0), Guarantee("contractive", 0.5, True)]))
    none
    """
    kinds = {p.kind for p in promises}
    value, sure = max((p.value for p in promises), default=0.0), all(p.sure for p in promises)
    if "none" in kinds:
        return Guarantee("none")
    lossy = {p.kind for p in promises if p.value > 0}
    if "unbiased" in kinds and "contractive" not in lossy:
        return Guarantee("unbiased", value, sure)
    if "unbiased" in kinds and value >= 1:
        return Guarantee("none")
    return Guarantee("contractive", value, sure)
