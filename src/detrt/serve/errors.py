"""The HTTP error response."""

from __future__ import annotations


class Refused(Exception):
    """Error response of a request or of one of its images. Workers send it to the front process, so that it can be pickled.

    status: of HTTP. code: one word for programs and metrics. message: what was wrong, got and allowed.
    retry_after: seconds. close: close the connection, because its body was not read.
    """

    def __init__(self, status: int, code: str, message: str, retry_after: int | None = None, close: bool = False) -> None:
        super().__init__(status, code, message, retry_after, close)
        self.status, self.code, self.message = status, code, message
        self.retry_after, self.close = retry_after, close

    def __str__(self) -> str:
        return self.message

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers | ({"Connection": "close"} if self.close else {})


def internal() -> Refused:
    """The refusal of a request that a bug of detrt ended."""
    return Refused(500, "internal", "an error inside the server; its log has the details")


def bad(message: str) -> Refused:
    """The refusal of a request that is wrong by itself."""
    return Refused(400, "bad_request", message)
