"""The norm of all comparisons, and sessions that tell and take selections."""

import numpy as np
import pytest

from detrt.backends.base import Choices
from detrt.backends.compare import difference, relative_error, selection_error
from detrt.backends.onnxruntime.session import OnnxSession
from detrt.backends.torch.session import TorchSession
from detrt.errors import SessionError
from detrt.models.example_inputs import example_feeds
from detrt.spec import BOXES, LABELS, LOGITS, PRED_BOXES

INF, NAN, LEAST = np.inf, np.nan, np.finfo(np.float32).min
ROWS = [
    # output, metric, expected, actual, error
    ("", "max", [4.0, 2.0], [4.0, 1.0], 0.25),
    ("", "rms", [3.0, 4.0], [3.0, 4.5], 0.1),
    (LOGITS, "max", [0.0, 0.0], [0.0, 0.0], 0.0),
    (LOGITS, "max", [1.0, -INF], [1.0, -6e4], 0.0),  # a masked class in a narrower type
    (LOGITS, "max", [1.0, -INF], [1.0, INF], INF),
    (LOGITS, "max", [1.0, INF], [1.0, 1e5], INF),
    (LOGITS, "max", [1.0, -1e5], [1.0, -INF], INF),
    (PRED_BOXES, "max", [1.0, -INF], [1.0, -INF], INF),
    (BOXES, "max", [1.0, -INF], [1.0, -6e4], INF),
    ("", "max", [1.0, LEAST], [1.5, -INF], 0.5),  # a fill value is no scale
    ("", "max", [1.0, INF], [1.0, 65504.0], 0.0),
    ("", "max", [1.0, NAN], [1.0, NAN], 0.0),  # a softmax over nothing, in the model
    (LOGITS, "max", [1.0, NAN], [1.0, NAN], INF),  # as an output it proves nothing
    (LOGITS, "max", [1.0, 2.0], [1.0, NAN], INF),
    ("", "max", [1.0, 2.0], [1.0, 2.0, 3.0], INF),
    ("", "max", [[1.0]], [1.0], INF),
]


@pytest.mark.parametrize(("output", "metric", "expected", "actual", "error"), ROWS)
def test_the_norm(output, metric, expected, actual, error):
    arrays = np.array(expected, np.float32), np.array(actual, np.float32)
    assert relative_error(*arrays, output, metric) == pytest.approx(error, rel=1e-6)
    if error == INF:
        assert difference(*arrays, output, metric)[1], "an infinite error is explained"


def test_one_wrong_label_of_many_is_no_rounding():
    """Relative to the largest of 1203 class ids it would be 8e-4, within the tolerance of FP32."""
    assert relative_error(np.array([1202, 5]), np.array([1202, 6]), LABELS) == 1.0


def test_both_sides_tell_and_take_selections(exported, tiny):
    report = exported("rt_detr_v2")
    plain = TorchSession(tiny("rt_detr_v2"), spec=report.spec)
    feeds = example_feeds(report.spec, 2, (report.spec.input.height, report.spec.input.width), seed=3)
    with OnnxSession(report.path) as graph, plain:
        sides = [(plain, graph), (graph, plain)]
        assert all(side.tells_selections and side.takes_selections for side in (plain, graph))
        for told, given in sides:
            outputs, chosen = told.selections(feeds)
            assert set(outputs) == {info.name for info in told.outputs}
            # The other way round, so that a side that does not take them is found out.
            turned = Choices([np.ascontiguousarray(array[:, ::-1]) for array in chosen.selections], chosen.cuts)
            want, got = told.run(feeds, turned), given.run(feeds, turned)
            assert max(relative_error(want[name], got[name], name) for name in outputs) <= 1e-4
            # Ten times what the two sides may differ by: the selections decide, and not rounding.
            assert max(relative_error(outputs[name], want[name], name) for name in outputs) > 1e-3
            with pytest.raises(SessionError, match="top-k selections"):
                given.run(feeds, Choices([*chosen.selections, *chosen.selections]))
        _, chosen = graph.selections(feeds)
        worst = Choices([np.zeros_like(array) for array in chosen.selections])
        assert selection_error(graph.run(feeds, chosen), 2) == 0 < 0.01 < selection_error(graph.run(feeds, worst), 2)


def test_a_session_of_bytes_does_not_pretend_to_tell(exported):
    with OnnxSession(exported("rt_detr_v2").path.read_bytes()) as session:
        assert not (session.tells_selections or session.takes_selections)
        with pytest.raises(SessionError, match="is not a file"):
            session.selections({})
