"""What can go wrong with a pull, each as its own type."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol import codes
from protocol.errors import R3Error
from protocol.messages import Problem, Range

if TYPE_CHECKING:
    from collector.client.routes import Routes


class PullError(R3Error):
    """A request that could not be served. `request_id` and `code` (a word of `protocol.codes`) say which and why."""

    def __init__(self, message: str, request_id: str = "", code: str = "") -> None:
        super().__init__(message)
        self.request_id = request_id
        self.code = code


class CollectorUnreachable(PullError):
    """No answer from the collector within the time given, or it is shutting down."""


class NotAdmitted(PullError):
    """The collector serves with keys, and this client's are none or others."""


class UnknownRequest(PullError):
    """No engine opened a request of this id before the deadline."""


class ReleasedRequest(PullError):
    """The request was released, or kept past its time to live."""


class NotReady(PullError):
    """The request was still running at the deadline."""


class RequestIncomplete(PullError):
    """Rows are missing for good, or until the engine repairs them. `missing`: ranges [start, stop)."""

    missing: tuple[Range, ...] = ()


class RequestAborted(PullError):
    """The request was aborted. `routes` holds its prefix."""

    routes: Routes | None = None


class RequestLost(PullError):
    """Its engine died, or its rows were shed: nobody can complete it."""


class RequestFailed(PullError):
    """The engine could not vouch for its rows."""


class AmbiguousRequest(PullError):
    """Several runs carry this id; send `token_ids` to choose one."""


class WrongTokens(PullError):
    """The rows belong to other tokens than the ones sent."""


class LengthMismatch(PullError):
    """More tokens were asked for than the engine finished with."""


class BadRequest(PullError):
    """The collector cannot serve such a pull: slice, dtype, size or limits."""


_BY_CODE: dict[str, type[PullError]] = {
    codes.UNKNOWN: UnknownRequest,
    codes.SHUTTING_DOWN: CollectorUnreachable,
    codes.RELEASED: ReleasedRequest,
    codes.NOT_READY: NotReady,
    codes.INCOMPLETE: RequestIncomplete,
    codes.ABORTED: RequestAborted,
    codes.LOST: RequestLost,
    codes.FAILED: RequestFailed,
    codes.AMBIGUOUS: AmbiguousRequest,
    codes.WRONG_TOKENS: WrongTokens,
    codes.LENGTH_MISMATCH: LengthMismatch,
}


def error_of(problem: Problem) -> PullError:
    """The typed error of a Problem."""
    error = _BY_CODE.get(problem.code, BadRequest)(problem.message, problem.request_id, problem.code)
    if isinstance(error, RequestIncomplete):
        error.missing = problem.missing
    return error
