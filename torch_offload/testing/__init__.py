"""For test suites: nasty modules, seams at which transitions fail, and the round trip as one assertion.

Example:
    >>> model = torch.nn.Linear(3, 3)
    >>> assert_round_trip(model, device="cpu")

`specimens` needs hypothesis, which is imported when it is called.
"""

from .modules import Specimen, specimens
from .round_trip import Portrait, assert_round_trip, is_away, mirrored_nbytes
from .seams import Fault, InjectedError, InjectedOutOfMemoryError, Link, Seam, failing, link, pretended_pinning

__all__ = [
    "Fault",
    "InjectedError",
    "InjectedOutOfMemoryError",
    "Link",
    "Portrait",
    "Seam",
    "Specimen",
    "assert_round_trip",
    "failing",
    "is_away",
    "link",
    "mirrored_nbytes",
    "pretended_pinning",
    "specimens",
]
