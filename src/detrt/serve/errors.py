"""What a request is answered when it gets no result."""

from __future__ import annotations


class Refused(Exception):
    """status: of HTTP. code: one word for programs and metrics. message: what was wrong, got and allowed.

    retry_after: seconds after which another try makes sense. close: end the connection, as its body was not read.
    """

    def __init__(self, status: int, code: str, message: str, *, retry_after: int | None = None, close: bool = False) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message
        self.retry_after, self.close = retry_after, close

    @property
    def headers(self) -> dict[str, str]:
        found = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            found["WWW-Authenticate"] = "Bearer"
        return found | ({"Connection": "close"} if self.close else {})
