"""Views of device memory against NumPy's on the same layout; no device is touched."""

import numpy as np
import pytest

from cudflash.errors import UsageError
from cudflash.ops.cuda.array import DeviceArray


def pair(array):
    """A NumPy view, and the device array of its layout."""
    address = array.__array_interface__["data"][0]
    return array, DeviceArray(None, address, array.shape, array.dtype, array.strides)


BASE = np.zeros((4, 6, 10), np.float32)


@pytest.mark.parametrize("view, shape", [
    (BASE, (24, -1)), (BASE[:, :3], (4, 30)), (BASE[:, :3], (4, 3, 2, 5)),
    (BASE[:, :, 5:], (24, 5)),
    (BASE[1:, :, :4], (3, 2, 3, 4)), (BASE[:2, 1:5], (2, -1)), (BASE[:1, :, 2:], (6, 8)),
    (BASE[:, 2:3], (4, 10)), (BASE[:, :, 3:4], (4, 6)), (BASE[:0], (0, 5)),
    (BASE[:, :3], (4, 1, 30, 1)), (BASE[2:3, :, :5], (1, 3, 2, 5))])
def test_a_reshaped_view_is_numpys(view, shape):
    """Strides of joined or split axes that skip, repeat or exchange elements."""
    host, device = pair(view)
    expected, found = host.reshape(shape), device.reshape(*shape)
    assert np.shares_memory(expected, view) or not view.size, "NumPy has copied"
    assert found.shape == expected.shape and found.address == device.address
    for axis, n in enumerate(found.shape):
        assert n <= 1 or found.strides[axis] == expected.strides[axis]


@pytest.mark.parametrize("view, shape", [
    (BASE[:, :3], (12, 10)), (BASE[:, :, :4], (4, 24)), (BASE[:, :3], (2, 60)), (BASE, (7, -1))])
def test_a_shape_that_would_need_a_copy_is_refused(view, shape):
    """A view of the gaps between rows."""
    with pytest.raises(UsageError, match="cannot be reshaped"):
        pair(view)[1].reshape(*shape)
