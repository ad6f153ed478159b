"""Nested samples of tensors to aligned, self-describing bytes and back, without pickle."""

from evenstep.serialize.copies import Copier, Copies, Copy, in_pieces, largest_memmove
from evenstep.serialize.document import dumps, loads
from evenstep.serialize.dtypes import ALIGNMENT
from evenstep.serialize.errors import DecodeError
from evenstep.serialize.files import dump, load
from evenstep.serialize.fold import VALUES_KEY, fold_values, unfold_values
from evenstep.serialize.laid_out import (
    FEW_ROWS,
    FieldJoiner,
    LaidOutSample,
    Part,
    copies_of_part,
    is_laid_out,
)
from evenstep.serialize.layout import TensorSample, sample_layout
from evenstep.serialize.manifest import Manifest
from evenstep.serialize.metadata import (
    SampleMeta,
    deserialize_sample,
    sample_byte_size,
    sample_keys,
    serialize_sample,
    tensor_metadata,
)
from evenstep.serialize.nested import (
    FlatSample,
    Leaf,
    NestedSample,
    flatten_nested,
    unflatten_nested,
)
from evenstep.serialize.packed import PackedSample, PackedSamples, pack
from evenstep.serialize.packing import pack_samples
from evenstep.serialize.schema import FieldSpec, SampleLayout, SampleSchema
from evenstep.serialize.unpacking import unpack_sample, unpack_samples

__all__ = [
    "ALIGNMENT",
    "FEW_ROWS",
    "VALUES_KEY",
    "Copier",
    "Copies",
    "Copy",
    "DecodeError",
    "FieldJoiner",
    "FieldSpec",
    "FlatSample",
    "LaidOutSample",
    "Leaf",
    "Manifest",
    "NestedSample",
    "PackedSample",
    "PackedSamples",
    "Part",
    "SampleLayout",
    "SampleMeta",
    "SampleSchema",
    "TensorSample",
    "copies_of_part",
    "deserialize_sample",
    "dump",
    "dumps",
    "flatten_nested",
    "fold_values",
    "in_pieces",
    "is_laid_out",
    "largest_memmove",
    "load",
    "loads",
    "pack",
    "pack_samples",
    "sample_byte_size",
    "sample_keys",
    "sample_layout",
    "serialize_sample",
    "tensor_metadata",
    "unflatten_nested",
    "unfold_values",
    "unpack_sample",
    "unpack_samples",
]
