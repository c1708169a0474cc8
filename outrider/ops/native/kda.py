"""KDA in C++: the form of ``outrider.ops.kda_step`` for bfloat16 on a CPU.

Prompt rows take the same path as decode rows, one by one: in float32 a chunk form has hardly fewer operations
(3 against 4 multiply-adds an element of the state and row), and where a prompt is cut does not matter.
A head's state lies transposed in its seat, ``[K, W]``: the recurrence has its lanes over values.

Dims: as in ``outrider.ops.kda_step``.
"""

import ctypes
import weakref

import torch

from outrider.ops.kda_step import KdaForm, KdaParameters, KdaSeats, LayerRows, ProjectedRows
from outrider.ops.native.library import INT, POINTER, REAL, Library
from outrider.ops.spans import SpanLayout

__all__ = ["native_kda"]

FLAG = ctypes.c_int32


class _Layer(ctypes.Structure):
    """``Layer`` of kda.cpp."""

    _fields_ = (
        ("taps_JC", POINTER),
        ("rate_H", POINTER),
        ("dt_bias_HD", POINTER),
        ("o_norm_D", POINTER),
        ("num_heads", INT),
        ("width", INT),
        ("num_taps", INT),
        ("lower_bound", REAL),
        ("is_bounded", FLAG),
        ("eps", REAL),
        ("scale", REAL),
    )


class _Seats(ctypes.Structure):
    """``Seats`` of kda.cpp."""

    _fields_ = (
        ("state_BHDD", POINTER),
        ("window_BXC", POINTER),
        ("u_RHD", POINTER),
        ("k_RHD", POINTER),
        ("decay_RHD", POINTER),
        ("inputs_RC", POINTER),
        ("num_layers", INT),
        ("num_seats", INT),
        ("num_rows", INT),
    )


ROWS_ARGUMENTS = (POINTER,) * 6 + (INT,) * 4 + (POINTER,) * 3 + (INT,) * 4 + (POINTER, INT)
COMMIT_ARGUMENTS = (POINTER,) + (INT,) * 3 + (POINTER,) * 3 + (INT,) * 3


def native_kda(library: Library) -> KdaForm:
    """Steps, prompts and commit of a library. State and log float32, the rest bfloat16, all on the CPU."""

    def bind_prompt(parameters: KdaParameters, chunk_size: int) -> LayerRows:
        return _Rows(library, parameters, is_prompt=True)

    return KdaForm(
        name=f"native {library.variant}",
        bind_step=lambda parameters: _Rows(library, parameters, is_prompt=False),
        bind_prompt=bind_prompt,
        commit=_Commit(library),
    )


class _Rows:
    """``kda_step`` or ``kda_prompt`` of one layer; holds copies of what it derives from the parameters."""

    def __init__(self, library: Library, parameters: KdaParameters, *, is_prompt: bool) -> None:
        self.is_prompt = is_prompt
        num_heads, width = parameters.dt_bias_HK.shape
        num_taps = parameters.conv_CJ.shape[1]
        # Held here, because the structure holds addresses only.
        self.tensors = (
            parameters.conv_CJ.transpose(0, 1).contiguous(),
            parameters.a_log_H.exp(),
            parameters.dt_bias_HK.contiguous(),
            parameters.o_norm_W.contiguous(),
        )
        for tensor in self.tensors:
            assert tensor.dtype == torch.float32 and tensor.device.type == "cpu", "parameters are float32 on the CPU"
        bound = parameters.lower_bound
        self.layer = _Layer(
            *(tensor.data_ptr() for tensor in self.tensors),
            num_heads=num_heads,
            width=width,
            num_taps=num_taps,
            lower_bound=0.0 if bound is None else bound,
            is_bounded=bound is not None,
            eps=parameters.eps,
            scale=width**-0.5,
        )
        self.address = ctypes.addressof(self.layer)
        self.inner = num_heads * width
        self.function = library.function("kda_rows", ROWS_ARGUMENTS)
        self.seats = _SeatsAddress()

    def __call__(self, rows: ProjectedRows, seats: KdaSeats, slots_S: torch.Tensor, layout: SpanLayout) -> torch.Tensor:
        num_rows = layout.num_rows
        parts = (rows.inputs_TC, rows.gate_TI, rows.forget_TI, rows.beta_TH)
        log_rows = seats.inputs_RC.size(0)
        assert self.is_prompt or num_rows <= log_rows, f"{num_rows} rows exceed a log of {log_rows}"
        out_TI = torch.empty((num_rows, self.inner), dtype=torch.bfloat16)
        rows_SM, valid_SM, slots_S = (
            layout.padded_rows_SM.contiguous(),
            layout.valid_SM.contiguous(),
            slots_S.contiguous(),
        )
        self.function(
            self.address,
            self.seats.of(seats, num_layers=1),
            *[part.data_ptr() for part in parts],
            *[_row_stride(part, num_rows) for part in parts],
            slots_S.data_ptr(),
            rows_SM.data_ptr(),
            valid_SM.data_ptr(),
            valid_SM.size(0),
            valid_SM.size(1),
            num_rows,
            self.is_prompt,
            out_TI.data_ptr(),
            torch.get_num_threads(),
        )
        return out_TI


class _Commit:
    """``kda_commit_seats``."""

    def __init__(self, library: Library) -> None:
        self.function = library.function("kda_commit", COMMIT_ARGUMENTS)
        self.seats = _SeatsAddress()

    def __call__(
        self, seats: KdaSeats, slots_S: torch.Tensor, rows_SM: torch.Tensor, num_committed_S: torch.Tensor
    ) -> None:
        num_layers, _, num_heads, width, _ = seats.state_BHWK.shape
        slots_S, rows_SM, num_committed_S = slots_S.contiguous(), rows_SM.contiguous(), num_committed_S.contiguous()
        for tensor in (slots_S, rows_SM, num_committed_S):
            assert tensor.dtype == torch.int64, f"{tensor.dtype} where int64 is read"
        self.function(
            self.seats.of(seats, num_layers=num_layers),
            num_heads,
            width,
            seats.window_BXC.shape[-2],
            slots_S.data_ptr(),
            rows_SM.data_ptr(),
            num_committed_S.data_ptr(),
            *rows_SM.shape,
            torch.get_num_threads(),
        )


class _SeatsAddress:
    """Addresses of the records of seats, made once for each: an engine brings the same ones every time.

    The seats are not kept alive here, as the model outlives the engine; their record lives as long as they do.
    """

    def __init__(self) -> None:
        self._records: dict[int, _Seats] = {}  # by id of the seats
        self._last: weakref.ref[KdaSeats] | None = None
        self._address = 0

    def of(self, seats: KdaSeats, *, num_layers: int) -> int:
        """Valid as long as the seats live."""
        if self._last is None or self._last() is not seats:
            records, key = self._records, id(seats)
            if key not in records:
                records[key] = _seats_record(seats, num_layers=num_layers)
                weakref.finalize(seats, records.pop, key, None).atexit = False
            self._last, self._address = weakref.ref(seats), ctypes.addressof(records[key])
        return self._address


def _seats_record(seats: KdaSeats, *, num_layers: int) -> _Seats:
    """Addresses of the seats; refuses what the C side would read wrongly."""
    wide = (seats.state_BHWK, seats.u_RHW, seats.k_RHK, seats.decay_RHK)
    narrow = (seats.window_BXC, seats.inputs_RC)
    assert seats.state_BHWK.shape[-1] == seats.state_BHWK.shape[-2], "key and value width are one"
    for tensors, dtype in ((wide, torch.float32), (narrow, torch.bfloat16)):
        for tensor in tensors:
            assert tensor.dtype == dtype and tensor.is_contiguous() and tensor.device.type == "cpu", (
                f"a seat tensor of {tensor.dtype} and strides {tensor.stride()} where contiguous {dtype} is read"
            )
    return _Seats(
        state_BHDD=seats.state_BHWK.data_ptr(),
        window_BXC=seats.window_BXC.data_ptr(),
        u_RHD=seats.u_RHW.data_ptr(),
        k_RHD=seats.k_RHK.data_ptr(),
        decay_RHD=seats.decay_RHK.data_ptr(),
        inputs_RC=seats.inputs_RC.data_ptr(),
        num_layers=num_layers,
        num_seats=seats.state_BHWK.shape[-4],
        num_rows=seats.inputs_RC.shape[-2],
    )


def _row_stride(part: torch.Tensor, num_rows: int) -> int:
    """Elements between rows; refuses what the C side would read wrongly."""
    row_stride, column_stride = part.stride()
    assert part.dtype == torch.bfloat16 and column_stride == 1 and part.size(0) == num_rows, (
        f"projections of {part.dtype}, shape {tuple(part.shape)} and strides {part.stride()} where {num_rows} rows "
        "of contiguous bfloat16 are read"
    )
    return row_stride
