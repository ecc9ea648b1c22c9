"""The scoped replacements of library code: restored, equal to the original, and bound to known code."""

from __future__ import annotations

import ast
import copy
import functools
import itertools
from importlib import import_module
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the 'export' extra")
transformers = pytest.importorskip("transformers", reason="needs the 'export' extra")

from random_rows import FAMILIES, MODELS

from detrt.errors import ExportError, GateError, SourceError
from detrt.export import ExportConfig, export_onnx
from detrt.models import rewrites as module_under_test
from detrt.models import source as source_module
from detrt.models.example_inputs import example_feeds
from detrt.models.families import BY_NAME, FILES, TESTED
from detrt.models.load import load_source
from detrt.models.ops.msda import ms_deform_attn
from detrt.models.rewrites import REWRITES, check_places, find, fingerprint, modeling_module, rewrites
from detrt.models.wrapper import ExportModule
from detrt.models.write_fingerprints import collect, is_read, with_fingerprints

LAYERS = Path(module_under_test.__file__).parent / "layers"
CASES = [(name, rewrite) for name, row in MODELS.items() for rewrite in BY_NAME[row[0]].rewrites]
ONE_OF_EACH = [("rt_detr", "msda"), ("d_fine", "msda"), ("deformable_detr", "symbolic_shapes"), ("rf_detr", "frozen_positions")]


def wanted(family, name):
    """One rewrite of a family."""
    return {name: BY_NAME[family].rewrites[name]}


def run(source, module=None):
    """Outputs of a Source, or of a module in FP64 in its place."""
    step = source.spec.input.multiple_of
    size = source.spec.input.size_hw if not source.spec.input.dynamic else (max(64, step), max(96, 2 * step))
    module = ExportModule(source.module, source.spec) if module is None else ExportModule(module, source.spec).double()
    feeds = example_feeds(source.spec, 2, size, seed=4)
    with torch.no_grad():
        return module(*(torch.from_numpy(feeds[name]) for name in module.input_names))


def patched_state(source):
    """Everything that the rewrites could touch: module globals, class members and instance members."""
    module = modeling_module(source.module)
    state = {("module", key): id(value) for key, value in vars(module).items()}
    for key, value in vars(module).items():
        if isinstance(value, type):
            state.update({(key, name): id(member) for name, member in vars(value).items()})
    for name, child in source.module.named_modules():
        state.update({(name, key): id(value) for key, value in vars(child).items()})
    return state


@pytest.mark.parametrize(("name", "rewrite"), CASES)
def test_same_function(name, rewrite, tiny, monkeypatch):
    # PP-DocLayoutV2 sorts flags; PyTorch alone leaves the order of equal ones to the processor.
    monkeypatch.setattr(torch, "argsort", functools.partial(torch.argsort, stable=True))
    source = tiny(name)
    module = copy.deepcopy(source.module).double()  # in FP32 rounding hides what differs
    before = run(source, module)
    with rewrites(module, wanted(source.family.name, rewrite)):
        inside = run(source, module)
    for a, b in zip(before, inside, strict=True):
        # Of the largest value: a softmax of transformers' Swin is in FP32 always.
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6 * max(1.0, float(a.abs().max())))


@pytest.mark.parametrize(("name", "rewrite"), ONE_OF_EACH)
def test_changes_something_and_restores_it(name, rewrite, tiny):
    source = tiny(name)
    before = patched_state(source)
    with rewrites(source.module, wanted(source.family.name, rewrite)):
        assert patched_state(source) != before
    assert patched_state(source) == before


@pytest.mark.parametrize(("name", "rewrite"), ONE_OF_EACH)
def test_restores_after_an_exception(name, rewrite, tiny):
    source = tiny(name)
    before = patched_state(source)
    with pytest.raises(ZeroDivisionError), rewrites(source.module, wanted(source.family.name, rewrite)):
        raise ZeroDivisionError
    assert patched_state(source) == before


def test_restores_when_a_later_rewrite_is_refused(tiny):
    source = tiny("rt_detr")
    before = patched_state(source)
    with (
        pytest.raises(ExportError, match="'frozen_positions' has no place"),
        rewrites(source.module, {**source.family.rewrites, "frozen_positions": {}}),
    ):
        pytest.fail("the block must not run")
    assert patched_state(source) == before


def test_no_rewrites_need_no_transformers_model():
    with rewrites(torch.nn.Linear(1, 1), {}):
        pass


def test_every_place_is_as_written():
    """Regenerate with `python -m detrt.models.write_fingerprints` after reading what changed."""
    for file in FILES:
        found = collect(file)
        known = [one for family in file.FAMILIES if is_read(family, transformers.__version__) for one in family.rewrites.values()]
        assert found.keys() == {place for places in known for place in places}
        for places in known:
            assert {place: found[place] in prints for place, prints in places.items()} == dict.fromkeys(places, True)
        source = Path(file.__file__).read_text("utf-8")
        assert with_fingerprints(source, found) == source
        assert with_fingerprints(source, {"x.forward": "0123456789abcdef"}) == source
    source = 'A = {"x.forward": ("a",), "y.forward": ("a", "b")}\n'  # a version with other code
    changed = with_fingerprints(source, {"x.forward": "c", "y.forward": "b"})
    assert eval(changed.removeprefix("A = ")) == {"x.forward": ("a", "c"), "y.forward": ("a", "b")}


def imported(path: Path, seen: set[Path]) -> set[str]:
    """Model types of transformers whose code a module of detrt imports, also through modules of `layers`."""
    types = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        module = getattr(node, "module", None) if isinstance(node, ast.ImportFrom) else None
        if module is None:
            continue
        if module.startswith("transformers.models."):
            types |= {module.split(".")[2]}
        if module == "transformers.models":
            types |= {one.name for one in node.names}
        inner = LAYERS / f"{module.removeprefix('layers.')}.py"
        if node.level and inner.is_file() and inner not in seen and (module.startswith("layers.") or path.parent == LAYERS):
            types |= imported(inner, seen | {inner})
    return types


def test_a_family_is_no_older_than_the_models_that_it_imports():
    """LTDETRv2 and DEIM's decoders failed in an older transformers, which has no DEIMv2: what they share with it was imported from one module."""
    since: dict[str, list[str]] = {}
    for family in FAMILIES:
        since.setdefault(family.model_type.replace("-", "_"), []).append(family.since)
    oldest = {name: min(found, key=TESTED.index) for name, found in since.items()}
    checked = 0
    for path in (LAYERS.parent / "families").glob("[a-z]*.py"):
        for family in getattr(import_module(f"detrt.models.families.{path.stem}"), "FAMILIES", ()):
            for name in imported(path, set()) & oldest.keys():
                assert TESTED.index(family.since) >= TESTED.index(oldest[name]), (family.name, name)
                checked += 1
    assert checked > 10


def test_four_versions_spread_over_the_year():
    """The numbers of releases stand for time: 5.0 is of January 2026, 5.23 of November."""
    minors = [int(version.split(".")[1]) for version in TESTED]
    assert (
        minors == sorted(set(minors))
        and len(minors) >= 4
        and minors[0] <= 5
        and all(is_read(family, TESTED[-1]) for family in FAMILIES)
    )
    assert max(b - a for a, b in itertools.pairwise(minors)) <= 10


@pytest.fixture
def installed(monkeypatch):
    """Pretend that another version of transformers is installed."""

    original = source_module.installed_version

    def pretend(version):
        monkeypatch.setattr(
            source_module, "installed_version", lambda name: version if name == "transformers" else original(name)
        )

    return pretend


def test_an_untested_version_is_refused_by_name(installed):
    installed("5.999.0")
    words = rf"transformers 5\.999\.0, which detrt was not tested with; tested: .*{TESTED[-1]}.*`allow_untested_transformers`"
    with pytest.raises(SourceError, match=words):
        load_source("random:yolos/tiny")


def test_other_code_of_an_untested_version_is_tried(installed, tiny, monkeypatch):
    module = modeling_module(tiny("rt_detr_v2").module)
    monkeypatch.setattr(module, "multi_scale_deformable_attention_v2", lambda *args, **choices: None)
    with pytest.raises(ExportError, match="has changed"):
        check_places(module, wanted("rt_detr_v2", "msda"))
    installed("5.999.0")
    check_places(module, wanted("rt_detr_v2", "msda"))


def test_the_check_decides_for_an_untested_version(installed, monkeypatch, tmp_path, plain_simplifier):
    """A rewrite that does not compute what that version computes."""
    installed("5.999.0")
    source = load_source("random:rt_detr_v2/tiny", allow_untested_transformers=True)
    with pytest.raises(ExportError, match=r"5\.999\.0, so the comparison decides; leave `check=False` out"):
        export_onnx(source, tmp_path / "m.onnx", ExportConfig(check=False))
    monkeypatch.setattr(module_under_test, "ms_deform_attn", lambda value, *rest: ms_deform_attn(value * 1.1, *rest))
    with pytest.raises(GateError, match="differs from PyTorch"):
        export_onnx(source, tmp_path / "m.onnx", ExportConfig())
    assert list(tmp_path.iterdir()) == []


def test_a_family_that_a_version_lacks_is_named(installed):
    installed("5.3.0")
    words = rf"'random:rf_detr/tiny' is RF-DETR, which detrt does not read with transformers 5\.3\.0, but with .*=={TESTED[-1]}"
    with pytest.raises(SourceError, match=words):
        load_source("random:rf_detr/tiny")
    assert load_source("random:detr/tiny").spec.family == "detr"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_every_rewrite_of_a_family_has_a_place(family, tiny):
    module = modeling_module(tiny(family.name).module)
    check_places(module, family.rewrites)
    assert all(family.rewrites.values()) and set(family.rewrites) <= {*REWRITES, *family.own_rewrites}


def test_changed_code_is_refused_by_name(tiny, monkeypatch):
    module = modeling_module(tiny("deformable_detr").module)
    cls = module.DeformableDetrEncoder

    def get_reference_points(spatial_shapes_list, valid_ratios, device):
        return None

    monkeypatch.setattr(cls, "get_reference_points", staticmethod(get_reference_points))
    words = rf"DeformableDetrEncoder\.get_reference_points has changed in transformers {transformers.__version__}.*{TESTED[-1]}"
    with (
        pytest.raises(ExportError, match=words),
        rewrites(tiny("deformable_detr").module, wanted("deformable_detr", "symbolic_shapes")),
    ):
        pytest.fail("the block must not run")


def test_code_that_is_gone_is_refused_by_name(tiny, monkeypatch):
    module = modeling_module(tiny("rt_detr_v2").module)
    monkeypatch.delattr(module, "multi_scale_deformable_attention_v2")
    with pytest.raises(ExportError, match="multi_scale_deformable_attention_v2 is gone"):
        check_places(module, wanted("rt_detr_v2", "msda"))


def test_code_without_source_is_refused_by_name(tiny, monkeypatch):
    """As in a frozen application: what cannot be read cannot be trusted."""
    module = modeling_module(tiny("rt_detr_v2").module)
    monkeypatch.setattr(module, "multi_scale_deformable_attention_v2", len)
    with pytest.raises(ExportError, match="multi_scale_deformable_attention_v2 has changed"):
        check_places(module, wanted("rt_detr_v2", "msda"))


@pytest.mark.parametrize(("name", "rewrite"), [("detr", "msda"), ("rt_detr", "symbolic_shapes"), ("yolos", "frozen_positions")])
def test_rewrite_of_another_family_is_refused(name, rewrite, tiny):
    words = rf"'{rewrite}' has no place in transformers\.models\.{name}"
    with pytest.raises(ExportError, match=words), rewrites(tiny(name).module, {rewrite: {}}):
        pytest.fail("the block must not run")


def test_model_of_no_transformers_class_is_refused():
    with pytest.raises(ExportError, match="Linear is not built on a transformers model"):
        modeling_module(torch.nn.Linear(1, 1))


def test_fingerprint_ignores_white_space_at_line_ends(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "first_spelling.py").write_text("def f(x):\n    return x\n")
    (tmp_path / "other_spelling.py").write_text("def f(x):  \n    return x  \n")
    (tmp_path / "other_code.py").write_text("def f(x):\n    return -x\n")
    first, second, third = (fingerprint(__import__(n).f) for n in ("first_spelling", "other_spelling", "other_code"))
    assert first == second != third
    assert len(first) == 16


def test_find():
    assert find(module_under_test, "fingerprint") is fingerprint
    assert find(module_under_test, "TorchForTracing.linspace") is module_under_test.TorchForTracing.linspace
    assert find(module_under_test, "Absent.forward") is None


@pytest.mark.parametrize("name", MODELS)
def test_random_models_see_the_image(name, tiny):
    """With weights that let the image vanish, every comparison of outputs would pass."""
    source = tiny(name)
    size = source.spec.input.size_hw if not source.spec.input.dynamic else (128, 128)
    images = torch.rand(2, 1, 3, *size, generator=torch.Generator().manual_seed(0))
    images[1, :, :, : size[0] // 2] *= 2
    with torch.no_grad():
        first, second = (source.module(pixel_values=pixels) for pixels in images)
    for output in ("logits", "pred_boxes"):
        a, b = getattr(first, output), getattr(second, output)
        assert float((a - b).abs().max() / a.abs().max()) > 1e-3, output


@pytest.mark.parametrize("cells", [1, 2, 49, 50, 51, 100, 150, 1000, 4096])
def test_positions_on_the_border_are_outside_however_a_division_rounds(cells):
    twice = 2 * torch.arange(cells) + 1  # centres, in halves of a cell
    inside = (100 * twice > 2 * cells) & (100 * twice < 198 * cells)
    centres = twice.to(torch.float32) / 2
    divided, multiplied = centres / cells, centres * torch.tensor(1 / cells, dtype=torch.float32)
    with rewrites(torch.nn.Linear(1, 1), {}):
        for positions in (divided, multiplied, divided * (1 + 2e-7), divided * (1 - 2e-7)):
            assert torch.equal((positions > 1e-2) & (positions < 1 - 1e-2), inside)


@pytest.mark.parametrize("name", [name for name, row in MODELS.items() if BY_NAME[row[0]].deformable])
def test_no_exported_graph_compares_with_the_border(name, exported):
    onnx = pytest.importorskip("onnx")
    model = onnx.load(exported(name).path)
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    compared = [
        float(constants[name].ravel()[0])
        for node in model.graph.node
        if node.op_type in ("Greater", "Less")
        for name in node.input
        if name in constants and constants[name].dtype.kind == "f" and constants[name].size == 1
    ]
    assert not [value for value in compared if min(abs(value - 0.01), abs(value - 0.99)) < 2e-7]
