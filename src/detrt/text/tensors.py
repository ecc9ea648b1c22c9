"""The text tensors of graphs: names and axes, the same in every graph, engine and runtime."""

from __future__ import annotations

# The text encoder turns the first two into the others.
INPUT_IDS = "input_ids"  # int64
ATTENTION_MASK = "attention_mask"  # int64, 1 = token, 0 = padding
TEXT_FEATURES = "text_features"  # float32
TEXT_SELF_MASK = "text_self_mask"  # int64, 1 = this token may look at that one
TEXT_POSITION_IDS = "text_position_ids"  # int64
CLASS_FEATURES = "class_features"  # float32
TASK_FEATURES = "task_features"  # float32
CLASS_MASK = "class_mask"  # int64, 1 = class, 0 = padding
TASK_MASK = "task_mask"  # int64, 1 = token
PHRASE_MASK = "phrase_mask"  # int64, 1 = this token belongs to this phrase
PHRASE_FEATURES = "phrase_features"  # float32

TOKENS_AXIS, CLASSES_AXIS, PHRASES_AXIS = LENGTH_AXES = ("tokens", "classes", "phrases")  # axes that follow from the prompt
FEATURES_AXIS = "d"  # the width of the text features; tensors with it are float32, the others int64

# Axes of the text inputs of a detector, and of its text encoder.
AXES: dict[str, tuple[str, ...]] = {
    INPUT_IDS: ("batch", TOKENS_AXIS),
    ATTENTION_MASK: ("batch", TOKENS_AXIS),
    TEXT_FEATURES: ("batch", TOKENS_AXIS, FEATURES_AXIS),
    TEXT_SELF_MASK: ("batch", TOKENS_AXIS, TOKENS_AXIS),
    TEXT_POSITION_IDS: ("batch", TOKENS_AXIS),
    PHRASE_MASK: ("batch", PHRASES_AXIS, TOKENS_AXIS),
    PHRASE_FEATURES: ("batch", PHRASES_AXIS, TOKENS_AXIS, FEATURES_AXIS),
    CLASS_FEATURES: ("batch", CLASSES_AXIS, FEATURES_AXIS),
    CLASS_MASK: ("batch", CLASSES_AXIS),
    TASK_FEATURES: ("batch", TOKENS_AXIS, FEATURES_AXIS),
    TASK_MASK: ("batch", TOKENS_AXIS),
}
TEXT_ENCODER_INPUTS = (INPUT_IDS, ATTENTION_MASK)
