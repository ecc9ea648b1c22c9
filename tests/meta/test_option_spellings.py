"""The core does not speak command line: messages name a field and its value, and `cli/` alone spells options.

A message outside `cli/` writes `size=640`, `check=False` or `build(MODEL, output=OUT)` between backticks, as Python does; the command line
replaces each (`cli/spellings.py`). So each name must be one that a command has an option for.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest
from branches import folded

from detrt.cli import _COMMANDS, load_command, spellings
from detrt.cli.spellings import COMMAND, spelled

PACKAGE = Path(spellings.__file__).parents[1]
ROOT = Path(__file__).resolve().parents[2]
OPTION = re.compile(r"(?<![\w-])(?:--(?:[A-Za-z{%]|$)|-[hopq]\b)")
# Options of other programs, which a message has the reader type.
OF_OTHERS = (
    "--address ADDRESS", "--data-binary", "--force-reinstall", "--format=csv,noheader", "--model-repository=", "--onnx=", "--query-gpu=",
    "--saveEngine=", "--stronglyTyped",
)  # fmt: skip
MARK = re.compile(r"`([a-z]\w*)(?:\(([^`]*)\)|=[^`]*)?`")


def texts(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, text) of each string that is no docstring; expressions of an f-string are {}."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.JoinedStr):
            found.append((node.lineno, "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            found.append((node.lineno, node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, bytes):
            found.append((node.lineno, node.value.decode("latin-1")))
        elif isinstance(node, ast.BinOp) and (text := folded(node)) is not None:
            found.append((node.lineno, text))
        for child in ast.iter_child_nodes(node):
            if not (isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant)):
                visit(child)

    visit(tree)
    return found


def options_in(source: str) -> list[str]:
    """Each text that spells an option, or begins to."""
    found = []
    for line, text in texts(ast.parse(source)):
        for theirs in OF_OTHERS:
            text = text.replace(theirs, "")
        text = re.sub(r"var\(--[a-z-]+\)", "", text)  # properties of style sheets
        found += [f"{line}: {text!r}"] if OPTION.search(text) else []
    return found


def core():
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] != "cli"]


def test_no_option_is_spelled_outside_the_command_line():
    found = {str(path.relative_to(PACKAGE)): options_in(path.read_text("utf-8")) for path in core()}
    assert [text.partition(" ")[2] for text in found.pop("models/hub.py")] == ["'--'"]  # between organisation and repository
    assert {name: texts for name, texts in found.items() if texts} == {}
    assert len(found) > 150


@pytest.mark.parametrize(
    "planted",
    [
        'x = "give --size 640"',
        'x = f"--{name} must be 1"',
        'x = f"got {x}; leave --no-check out"',
        'x = "with -o OUT"',
        '{"flag": "--sm"}',
        'x = "--" + name',
        'x = "-" + "-size"',
        'x = "-" * 2 + "size"',
        'x = "give %s" % "--size"',
        'x = "{}{}".format("--", name)',
        'x = "--{name}".format(name=1)',
        'x = "--%s" % name',
        'x = "".join(("--", "size"))',
        'x = b"--size 640"',
        'x = "give \\u002d\\u002dsize"',
        'x = "--Size"',
        'x = "use -q, or -h"',
        'def f(x="(--size)"): pass',
        'raise ValueError("""give\n--size""")',
    ],
)
def test_a_planted_option_is_found(planted):
    assert options_in(planted)
    assert not options_in(f'def f():\n    """--size: a docstring."""\n    return "a -- b, x-o, {OF_OTHERS[0]}"')


def test_each_name_in_a_message_has_an_option():
    unknown = []
    for path in core():
        for line, text in texts(ast.parse(path.read_text("utf-8"))):
            for mark in MARK.finditer(text):
                names = [mark[1]] if mark[2] is None else re.findall(r"(\w+)=", mark[2])
                unknown += [f"{path.name}:{line}: {name}" for name in names if spellings._flag(name, False, "") is None]
    assert unknown == []


@functools.cache
def known() -> dict[str, set[str]]:
    """Command -> its options, also those that switch one off."""
    return {
        name: {option for one in load_command(name).params for option in (*one.opts, *one.secondary_opts)} for name in _COMMANDS
    }


def foreign_options(text: str) -> list[tuple[str, str]]:
    """(command, option) where a text names a command and gives it what only another has, if any: `detrt eval X --sm 86`, the call
    `verify(X, sms=86)`, `--sm` of `detrt eval`."""
    used = []
    for name, rest in re.findall(r"detrt ([a-z][a-z-]*)\b((?:(?!\bdetrt )[^;`\n])*)", text):
        used += [(name, option) for option in re.findall(r"(?<![\w-])--?[a-z][\w-]*", rest)]
    for name, arguments in re.findall(r"`([a-z]\w*)\(([^`]*)\)`", text):
        command = name.replace("_", "-")
        used += [(command, spellings._flag(field, False, command) or field) for field in re.findall(r"(\w+)=", arguments)]
    used += [(name, option) for option, name in re.findall(r"`(--[\w-]+)[^`]*`,? of `detrt ([a-z-]+)", text)]
    return [(name, option) for name, option in used if option not in known().get(name, {option})]


def test_options_are_those_of_the_command_that_the_text_names():
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for line, text in texts(ast.parse(path.read_text("utf-8"))):
            found[f"{path.name}:{line}"] = foreign_options(text)
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        found[path.name] = foreign_options(path.read_text("utf-8"))
    assert {where: options for where, options in found.items() if options} == {}


def test_a_command_speaks_of_its_own_options():
    """In the module of a command, but where the text names another one."""
    modules: dict[str, set[str]] = {}
    for name, (place, _) in _COMMANDS.items():
        modules.setdefault(place.partition(":")[0], set()).add(name)
    found = []
    for module, names in modules.items():
        own = set().union(*(known()[name] for name in names))
        others = re.compile(rf"\b(?:{'|'.join(sorted(set(_COMMANDS) - names))}) ")
        for line, text in texts(ast.parse((PACKAGE / "cli" / f"{module}.py").read_text("utf-8"))):
            if not others.search(text):
                found += [f"{module}.py:{line}: {one}" for one in re.findall(r"(?<![\w-])--[a-z][\w-]*", text) if one not in own]
    assert found == []


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("type: detrt eval bundle --sm 86 --ground-truth x.json", [("eval", "--sm")]),
        ("detrt build new -o x, then detrt detect x photos/ --save-dir runs; --sm", []),
        ("`verify(MODEL, sms=86)`", [("verify", "--sm")]),
        ("`build(MODEL, output=OUT, sms=86)`", []),
        ("| `--atol` | `--tensor` of `detrt verify` | and `--tensor` of `detrt eval` |", [("eval", "--tensor")]),
    ],
)
def test_an_option_of_another_command_is_found(text, wanted):
    assert foreign_options(text) == wanted


def test_messages_are_spelled_for_the_command_line():
    for text, wanted in {
        "give `size=480x640`, or leave `check=False` out": "give --size 480x640, or leave --no-check out",
        "`targets=tensorrt` needs `sms`": "--target tensorrt needs --sm",
        "`precision=int8` with `calibration=DIR`; `output` is a file": "--precision int8 with --calibration DIR; --output is a file",
        "type: `build(MODEL, output=OUT, targets=openvino)`": "type: detrt build MODEL -o OUT --target openvino",
        "add `no_masks`, or `prompt='a cat. a dog.'`": "add --no-masks, or --prompt 'a cat. a dog.'",
        "'`unknown`' and `no call` stay; so does a ` alone": "'`unknown`' and `no call` stay; so does a ` alone",
    }.items():
        assert spelled(text) == wanted
    token = COMMAND.set("serve")
    assert spelled("`timeout_s` or `drain_s`, `devices`") == "--timeout or --drain, --device"
    COMMAND.reset(token)
    assert spelled("`any_field=3`", by_rule=True) == "--any-field 3"


def test_python_and_the_command_line_say_the_same_refusal_each_in_its_words(tmp_path, capsys):
    from detrt import EngineConfig
    from detrt.cli import main
    from detrt.errors import EngineError

    with pytest.raises(EngineError, match="such as `sms=86,89`"):
        EngineConfig(sms=(12,))
    (tmp_path / "model.onnx").write_bytes(b"")
    arguments = ["build", str(tmp_path / "model.onnx"), "-o", str(tmp_path / "out"), "--target", "tensorrt-rtx", "--sm", "12"]
    assert main(arguments) == 2
    assert "such as --sm 86,89" in capsys.readouterr().err
