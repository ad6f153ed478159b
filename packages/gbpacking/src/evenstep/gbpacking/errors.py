"""The errors of packing; those that concern several ranks derive from the exchange's base class."""

from evenstep.exchange import ExchangeError


class PackingError(ExchangeError):
    """Base class of what a step raises once ranks talk to each other."""


class IteratorEndedError(PackingError):
    """A data iterator ended inside a step.

    Attributes:
        pulled: Micro-batches that it still yielded.
        wanted: Micro-batches of the step.
    """

    def __init__(self, pulled: int, wanted: int) -> None:
        self.pulled, self.wanted = pulled, wanted
        super().__init__(
            f"the data iterator ended after {pulled} of the {wanted} micro-batches of this step; "
            "drop the incomplete global batch in the sampler, or repeat the data"
        )


class SampleError(PackingError, ValueError):
    """A sample breaks the contract."""
