"""Why a replay was refused, or could not be proven, each as its own type."""

from __future__ import annotations

from protocol.errors import R3Error


class ReplayError(R3Error):
    """Base of what replay refuses. The fields that apply are set, the others are None.

    request_id: the request at fault. row: its row, that is the index of the token whose forward it is. layer: global
    decoder layer id. expected, found: what was wanted and what was there instead.
    """

    def __init__(
        self,
        what: str,
        *,
        request_id: str | None = None,
        row: int | None = None,
        layer: int | None = None,
        expected: object = None,
        found: object = None,
        way_out: str = "",
    ) -> None:
        named = (("request", request_id), ("row", row), ("layer", layer), ("expected", expected), ("found", found))
        facts = ", ".join(f"{name} {value}" for name, value in named if value is not None)
        super().__init__(what + (f" ({facts})" if facts else "") + (f"; {way_out}" if way_out else ""))
        self.request_id = request_id
        self.row = row
        self.layer = layer
        self.expected = expected
        self.found = found


class RoutesError(ReplayError):
    """Base of what is wrong with the routes themselves: found before any forward."""


class WrongRowCount(RoutesError):
    """Rows and tokens disagree: a sequence of T tokens has T-1 rows."""


class WrongTopK(RoutesError):
    """The routes name more or fewer experts per token than the model's routers choose."""


class WrongExpertCount(RoutesError):
    """The routes come from a model with another number of experts."""


class WrongLayerAxis(RoutesError):
    """The layers of the routes are not the model's, or a layer without a router holds ids."""


class ExpertOutOfRange(RoutesError):
    """An id that is neither an expert of the model nor -1."""


class DuplicateExpert(RoutesError):
    """A row names one expert twice at one layer."""


class PartialRow(RoutesError):
    """A row has ids in some places and -1 in others. A missing row is -1 throughout."""


class MissingRowsDisagree(RoutesError):
    """The rows that hold nothing are not the rows that are declared missing."""


class LayoutError(ReplayError):
    """The batch layout does not describe a batch of these requests."""


class BatchMismatch(ReplayError):
    """The forward was given another batch than the layout describes."""


class RoutersNotFound(ReplayError):
    """The model's routers cannot be told from its module tree."""


class CompiledModel(ReplayError):
    """Compiled modules do not run hooks: replay would be silently off."""


class AlreadyReplaying(ReplayError):
    """Another block replays routes on this model now."""


class UnprovenReplay(ReplayError):
    """Base of what makes a forward count as not replayed."""


class RouterCalledTwice(UnprovenReplay):
    """A router ran more than once in one forward: which rows belong to which call cannot be told."""


class RouterNotCalled(UnprovenReplay):
    """A forward ended without having run every router."""


class RouterOutsideForward(UnprovenReplay):
    """A router ran outside a forward of the module that replay was given."""


class RouterSkippedTopk(UnprovenReplay):
    """A router chose its experts without `torch.topk`, so nothing could be forced."""


class AmbiguousTopk(UnprovenReplay):
    """A router called `torch.topk` more than once in the shape of its final choice."""


class RouterOutputUnknown(UnprovenReplay):
    """A router's output holds no single tensor of expert ids, so what it used cannot be read."""


class UsedOtherExperts(UnprovenReplay):
    """A router returned other ids than the ones installed."""


class LostWeight(UnprovenReplay):
    """A replayed expert got a weight of zero, or one that is not a number."""


class NothingReplayed(UnprovenReplay):
    """A block closed without one complete forward of its model."""


class UntracedRecompute(UnprovenReplay):
    """A checkpoint recomputed a router and the forward that it belongs to cannot be told."""
