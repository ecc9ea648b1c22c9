"""An annotation file whose names and ids tell categories and images apart."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def truth(tmp_path):
    path = tmp_path / "truth.json"
    path.write_text(
        json.dumps(
            {
                "images": [
                    {"id": 40, "file_name": "one.jpg"},
                    {"id": 41, "file_name": "left/same.jpg"},
                    {"id": 42, "file_name": "right/same.jpg"},
                ],
                "categories": [
                    {"id": 18, "name": "Dog"},
                    {"id": 5, "name": "airplane"},
                    {"id": 6, "name": "hot_dog"},
                ],
            }
        )
    )
    return path
