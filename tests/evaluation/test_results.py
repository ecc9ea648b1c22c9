"""Files of results that others wrote: what has no order or no rows is refused, and never evaluated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from detrt.errors import ImageError
from detrt.evaluation.results import read_results

ROW = {"image_id": 1, "category_id": 1, "bbox": [0, 0, 1, 1], "score": 0.5}


@pytest.mark.parametrize("score", ["NaN", "Infinity", "-Infinity", "1e999", "true", '"0.5"', "null"])
def test_a_score_is_a_number_with_an_order(tmp_path, score):
    path = tmp_path / "r.json"
    path.write_text(json.dumps([ROW, ROW | {"score": "?"}]).replace('"?"', score))
    with pytest.raises(ImageError, match=r"r\.json': entry 1 has .* score"):
        read_results(path)
    path.write_text(json.dumps([ROW, ROW | {"score": 2}]))
    assert len(read_results(path)) == 2


@pytest.mark.parametrize("line", ['{"image_id": 1}', "[1]", "1", '{"image_id": 1, "rows": {"a": 1}}'])
def test_a_resume_file_has_the_rows_of_each_image(tmp_path, line):
    path = tmp_path / "state.jsonl"
    path.write_text('{"detrt_eval": 1}\n' + json.dumps({"image_id": 1, "rows": [ROW]}) + "\n")
    assert read_results(path) == [ROW]
    path.write_text('{"detrt_eval": 1}\n' + line + "\n")
    with pytest.raises(ImageError, match=r"state\.jsonl"):
        read_results(path)


def test_a_folder_is_not_called_missing(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="is a folder, not a results file; make one with"):
        read_results(tmp_path)
    with pytest.raises(ImageError, match="there is no results file"):
        read_results(tmp_path / "gone.json")
