"""An object whose unpickling runs code."""

from __future__ import annotations

import os


class Payload:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)
