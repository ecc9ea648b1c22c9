"""Weights of FP8 that are rounded together: values of the type, and less noise on inputs that they were not fitted to."""

from __future__ import annotations

import numpy as np
import pytest

from detrt.precision.quantize import round_to_precision, weight_scales
from detrt.precision.rounding import round_weights
from detrt.spec import Precision

INPUTS, CHANNELS = 96, 24


def layer(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(weight, a matrix that mixes independent values into inputs that depend on each other)."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(CHANNELS, INPUTS)).astype(np.float32), rng.normal(size=(INPUTS, INPUTS)) @ np.diag(
        1.0 / np.arange(1, INPUTS + 1)
    )


def draw(mix: np.ndarray, positions: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(exact inputs, rounded ones)."""
    exact = (np.random.default_rng(seed).normal(size=(positions, INPUTS)) @ mix.T).astype(np.float32)
    scale = np.float32(np.abs(exact).max() / 448)
    return exact, round_to_precision(exact / scale, Precision.FP8) * scale


def noise(weight: np.ndarray, rounded: np.ndarray, exact: np.ndarray, inputs: np.ndarray) -> float:
    return float((inputs @ rounded.T - exact @ weight.T).var(0).sum())


@pytest.mark.parametrize("axis", (0, None))
@pytest.mark.parametrize(("positions", "most"), [(4000, 0.75), (INPUTS // 3, 1.0)])
def test_less_noise_on_inputs_that_were_not_seen(axis, positions, most):
    """Also from fewer positions than a layer has inputs nothing gets worse."""
    weight, mix = layer(1)
    exact, inputs = draw(mix, positions, 2)
    rounded, scale = round_weights(weight, inputs, inputs - exact, axis, Precision.FP8, has_bias=True)
    least = weight_scales(weight, axis, Precision.FP8).astype(np.float32).reshape(-1, 1)
    nearest = round_to_precision(weight / least, Precision.FP8) * least
    other_exact, other = draw(mix, 4000, 3)
    assert noise(weight, rounded, other_exact, other) < most * noise(weight, nearest, other_exact, other)
    assert scale.shape == (() if axis is None else (CHANNELS,)) and scale.dtype == np.float16


@pytest.mark.parametrize("axis", (0, None))
def test_the_result_has_values_of_fp8(axis):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    weight, mix = layer(4)
    exact, inputs = draw(mix, 500, 5)
    rounded, scale = round_weights(weight, inputs, inputs - exact, axis, Precision.FP8, has_bias=False)
    units = rounded / scale.astype(np.float32).reshape(-1, 1)
    np.testing.assert_allclose(units.astype(ml_dtypes.float8_e4m3fn).astype(np.float32), units, rtol=1e-6)


def test_inputs_of_zeros_leave_the_weights_to_the_nearest_values():
    weight, _ = layer(6)
    zeros = np.zeros((10, INPUTS), np.float32)
    assert round_weights(weight, zeros, zeros, 0, Precision.FP8, has_bias=True) is None
