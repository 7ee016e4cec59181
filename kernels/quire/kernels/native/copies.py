"""Copies blocks between the KV caches of a model's layers and outside memory, in one call."""

import ctypes
from collections.abc import Sequence
from ctypes import byref

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.native import abi as native_abi
from quire.kernels.native import library as native

# A caches   N blocks of each   X blocks outside   B copies   P words of a block in one cache

Longs = npt.NDArray[np.int64]


class PieceCopies:
    """Copies between caches in which a block is contiguous, and outside memory in which a block of
    all caches is contiguous."""

    def __init__(self, caches: Sequence[Tensor], outside_XAP: Tensor) -> None:
        """The caches are ``[N, P]``, contiguous and of one type; so is each piece outside.

        Raises:
            ValueError: A tensor has another shape or type, or is not contiguous.
        """
        library = native.library()
        assert library is not None, "the caches are laid out for it"
        num_words = caches[0].shape[1]
        shape, dtype = outside_XAP.shape, caches[0].dtype
        if shape[1:] != (len(caches), num_words) or outside_XAP.stride(2) != 1:
            raise ValueError(
                f"memory outside {tuple(shape)}: must be [X, {len(caches)}, {num_words}]"
            )
        for cache in (*caches, outside_XAP):
            if cache.dtype != dtype or not cache.is_cpu:
                raise ValueError(f"{cache.dtype} on {cache.device}: must be {dtype} on the CPU")
        if any(not cache.is_contiguous() or cache.shape != caches[0].shape for cache in caches):
            raise ValueError("caches: must be contiguous and of one shape")
        self._memory = (*caches, outside_XAP)
        self._copy = library.quire_copy_blocks
        self._caches = (ctypes.c_void_p * len(caches))(*(cache.data_ptr() for cache in caches))
        word = dtype.itemsize
        self._arguments = native_abi.CopyBlocksArgs(
            num_caches=len(caches),
            piece_bytes=num_words * word,
            outside=outside_XAP.data_ptr(),
            block_stride=outside_XAP.stride(0) * word,
            piece_stride=outside_XAP.stride(1) * word,
        )

    def run(self, cache_blocks_B: Longs, outside_blocks_B: Longs, *, goes_out: bool) -> None:
        """Copies ``outside[o] = caches[c]`` for each pair of c and o if ``goes_out``, else the
        other way round. Block numbers are not checked. No block may be a target twice."""
        cache_blocks_B = np.ascontiguousarray(cache_blocks_B)
        outside_blocks_B = np.ascontiguousarray(outside_blocks_B)
        arguments = self._arguments
        arguments.cache_blocks = cache_blocks_B.ctypes.data
        arguments.outside_blocks = outside_blocks_B.ctypes.data
        arguments.num_blocks = len(cache_blocks_B)
        arguments.goes_out = goes_out
        self._copy(byref(arguments), self._caches, torch.get_num_threads())
