"""Weights of FP8 that are rounded together: values of the type, and less noise on inputs that they were not fitted to."""

from __future__ import annotations

import numpy as np
import pytest

from detrt.precision.quantize import round_to_precision, weight_scales
from detrt.precision.rounding import BLOCK, DAMPING, Moments, round_weights
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


def together(weight, inputs, errors, axis, *, has_bias, block=10**9):
    moments = Moments(weight, has_bias=has_bias)
    for start in range(0, len(inputs), block):
        moments.add(inputs[start : start + block], errors[start : start + block])
    return round_weights(moments, axis, Precision.FP8)


def obs_rounded(weight, inputs, exact, scale, *, has_bias):
    """GPTQ as it is derived: round one input, move all others by the row of the inverse covariance, remove it from that inverse.

    The weights before are a least-squares fit of the exact result to the rounded inputs, held to the exact weights by the damping.
    """
    ml_dtypes = pytest.importorskip("ml_dtypes")
    inputs, exact = inputs.astype(np.float64), exact.astype(np.float64)
    if has_bias:
        inputs, exact = inputs - inputs.mean(0), exact - exact.mean(0)
    positions, count = inputs.shape
    damping = (DAMPING + count / positions) * (inputs**2).mean()
    stacked = np.vstack([inputs, np.sqrt(damping * positions) * np.eye(count)])
    wanted = np.vstack([exact @ weight.T, np.sqrt(damping * positions) * weight.T.astype(np.float64)])
    left = np.linalg.lstsq(stacked, wanted, rcond=None)[0]  # (inputs, channels)
    inverse = np.linalg.inv(stacked.T @ stacked / positions)
    result = np.empty_like(left)
    for i in np.argsort(-(inputs**2).mean(0), kind="stable"):
        units = (left[i] / scale).clip(-448, 448).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
        result[i] = units.astype(np.float64) * scale
        error = (left[i] - result[i]) / inverse[i, i]
        left -= np.outer(inverse[i], error)
        inverse -= np.outer(inverse[i], inverse[i]) / inverse[i, i]
        inverse[i, i] = np.inf  # done
    return result.T


@pytest.mark.parametrize("has_bias", (True, False))
@pytest.mark.parametrize("axis", (0, None))
@pytest.mark.parametrize("kind", ("ordinary", "few positions", "dead", "constant", "equal", "one position"))
def test_the_weights_are_those_of_gptq(kind, axis, has_bias):
    rng = np.random.default_rng(11)
    count = 2 * BLOCK + 9
    weight = rng.normal(size=(CHANNELS, count)).astype(np.float32)
    weight[3] = 0
    positions = {"few positions": 40, "one position": 1}.get(kind, 700)
    exact = (rng.normal(size=(positions, count)) @ rng.normal(size=(count, count)) + 3 * rng.normal(size=count)).astype(
        np.float32
    )
    if kind == "dead":
        exact[:, ::3] = 0
    if kind == "constant":
        exact[:, ::3] = 7.3
    if kind == "equal":  # the covariance has no inverse
        exact[:, 1::2] = exact[:, :-1:2]
    step = np.float32(np.abs(exact).max() / 448)
    inputs = round_to_precision(exact / step, Precision.FP8) * step
    found = together(weight, inputs, inputs - exact, axis, has_bias=has_bias, block=64)
    if kind == "one position" and has_bias:  # the bias alone gives the exact result
        assert found is None
        return
    rounded, scale = found
    want = obs_rounded(weight, inputs, exact, scale.astype(np.float64), has_bias=has_bias)
    # Halfway between two values 1e-16 decides, and moves what is rounded after it.
    assert np.mean(rounded == want.astype(np.float32)) > 0.999


@pytest.mark.parametrize("axis", (0, None))
@pytest.mark.parametrize("has_bias", (True, False))
def test_blocks_change_nothing(axis, has_bias):
    weight, mix = layer(7)
    exact, inputs = draw(mix, 300, 8)
    once, scale = together(weight, inputs + 5, inputs - exact, axis, has_bias=has_bias)
    for block in (1, 64, 299):
        again, same = together(weight, inputs + 5, inputs - exact, axis, has_bias=has_bias, block=block)
        np.testing.assert_array_equal(again, once)
        np.testing.assert_array_equal(same, scale)


@pytest.mark.parametrize("axis", (0, None))
@pytest.mark.parametrize(("positions", "most"), [(4000, 0.75), (INPUTS // 3, 1.0)])
def test_less_noise_on_inputs_that_were_not_seen(axis, positions, most):
    """Also from fewer positions than a layer has inputs nothing gets worse."""
    weight, mix = layer(1)
    exact, inputs = draw(mix, positions, 2)
    rounded, scale = together(weight, inputs, inputs - exact, axis, has_bias=True)
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
    rounded, scale = together(weight, inputs, inputs - exact, axis, has_bias=False)
    units = rounded / scale.astype(np.float32).reshape(-1, 1)
    np.testing.assert_allclose(units.astype(ml_dtypes.float8_e4m3fn).astype(np.float32), units, rtol=1e-6)


@pytest.mark.parametrize(("value", "has_bias"), [(0.0, True), (0.0, False), (np.nan, False), (3.3, True)])
def test_inputs_that_say_nothing_leave_the_weights_to_the_nearest_values(value, has_bias):
    weight, _ = layer(6)
    inputs = np.full((10, INPUTS), value, np.float32)
    assert together(weight, inputs, inputs * 0, 0, has_bias=has_bias, block=3) is None
