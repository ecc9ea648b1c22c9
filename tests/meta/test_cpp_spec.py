"""Each field of the spec is read and used in C++, or is named here with the reason why it need not be."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from detrt.data.images import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from detrt.spec import _ENCODER_KEY, DecodeSpec, InputSpec, ModelSpec, TextSpec

CPP = Path(__file__).resolve().parents[2] / "cpp"
READER = (CPP / "src/spec.cpp").read_text("utf-8")
HEADER = (CPP / "include/detrt/spec.hpp").read_text("utf-8")
USERS = "\n".join(path.read_text("utf-8") for path in sorted(CPP.rglob("*.[ch]pp")) if path.name not in ("spec.cpp", "spec.hpp"))
# Part of the spec -> its class, and the functions that read it in C++.
PARTS = {
    "spec": (ModelSpec, "read_spec"),
    "input": (InputSpec, "read_input"),
    "decode": (DecodeSpec, "read_decode"),
    "text": (TextSpec, "read_text"),
}
# A field that C++ takes and does not read.
NOT_READ = {("input", "rounded"): "it is for `antialias` false, which is refused"}
# A field that C++ does not know, so that a spec with it is refused.
UNKNOWN = {("text", "query_encoder"): "of OWL-ViT, whose kind of prompt is refused"}
# A member of a struct that no other file uses.
OWN = {
    "pad": "it is in `one_size`, which the others ask",
    "family": "a name of the model, by which nothing differs",
    "score_threshold": "the graph cuts by it, and tells how many are left",
    **dict.fromkeys(
        ("max_tokens", "features", "separators", "tokenizer", "encoder"), "a file of a prompt, written in Python, has its tensors"
    ),
}
_READ = re.compile(r'(?:fields\.(?:at|text|flag|number|integer|one_of)\(|!fields\.has\(|(?:edge|three)\(fields, )"(\w+)"')


def names(part: str) -> set[str]:
    own, _ = PARTS[part]
    found = {_ENCODER_KEY if (part, one.name) == ("text", "encoder") else one.name for one in fields(own)}
    return found | ({"schema"} if part == "spec" else set())


def body(function: str) -> str:
    found = re.search(rf"^\w+ {function}\(.*?\n}}\n", READER, re.MULTILINE | re.DOTALL)
    assert found, function
    return found[0]


@pytest.mark.parametrize("part", PARTS)
def test_cpp_knows_the_fields_of_a_spec(part: str) -> None:
    allowed = re.search(r"fields\.only\(\{(.*?)\}\)", body(PARTS[part][1]), re.DOTALL)
    assert allowed
    assert set(re.findall(r'"(\w+)"', allowed[1])) == names(part) - {name for where, name in UNKNOWN if where == part}


@pytest.mark.parametrize("part", PARTS)
def test_cpp_reads_what_it_knows(part: str) -> None:
    skipped = {name for where, name in (*NOT_READ, *UNKNOWN) if where == part}
    assert set(_READ.findall(body(PARTS[part][1]))) == names(part) - skipped


def test_cpp_uses_what_it_reads() -> None:
    structs = re.findall(r"struct (?:\w+ )?(?:Input|Decode|Text|Model)Spec \{(.*?)\n\};", HEADER, re.DOTALL)
    assert len(structs) == 4
    lines = [line.split("//")[0].strip() for struct in structs for line in struct.splitlines()]
    declared = [line.rstrip("; ") for line in lines if line.endswith(";") and "(" not in line]
    without_values = [re.sub(r" = [^,]+|\{[^}]*\}|<[^>]*>", "", line) for line in declared]
    members = {name.split()[-1] for line in without_values for name in line.split(",")}
    assert {"longest_edge", "nms_iou", "mean", "labels", "has_masks", "pad_id"} <= members and len(members) == 42, members
    unused = {name for name in members if not re.search(rf"[.>]{name}\b", USERS)}
    assert unused == set(OWN)


def test_each_suffix_of_python_is_read_in_c_or_told():
    """Files that C++ does not read are counted in a note, as long as it knows that they are images or videos."""
    source = (CPP / "src/image.cpp").read_text("utf-8")
    read, told = (
        set(re.findall(r'"(\.\w+)"', source.partition(f"{name}() {{")[2].partition("};")[0]))
        for name in ("image_suffixes", "other_suffixes")
    )
    assert read and not read & told and read | told == IMAGE_SUFFIXES | VIDEO_SUFFIXES
