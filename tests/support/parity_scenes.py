"""Scenes and captions on which two implementations are compared."""

from __future__ import annotations

from detrt.data.scenes.phrases import Caption, caption_scene
from detrt.data.scenes.scene import Scene, draw_scene

PARITY_SEED = 2**39  # written data sets and training use other seeds


def parity_set(scenes: int = 50, prompts: int = 5) -> list[tuple[Scene, tuple[Caption, ...]]]:
    """Scenes for comparing two implementations, each with ``prompts`` captions of 1 to 20 phrases.

    Always the same; the last caption of each scene may hold held-out pairs.
    """
    lengths = (4, 1, 8, 20, 12)
    found = []
    for k in range(scenes):
        scene = draw_scene(PARITY_SEED + k)
        captions = tuple(
            caption_scene(scene, k * prompts + j, phrases=lengths[j % len(lengths)], held_out=j == prompts - 1)
            for j in range(prompts)
        )
        found.append((scene, captions))
    return found
