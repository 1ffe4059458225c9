from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetExpertStatusRequest(_message.Message):
    __slots__ = ("include_load", "include_placement", "model")
    INCLUDE_LOAD_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    include_load: bool
    include_placement: bool
    model: str
    def __init__(self, include_load: _Optional[bool] = ..., include_placement: _Optional[bool] = ..., model: _Optional[str] = ...) -> None: ...

class GetExpertStatusResponse(_message.Message):
    __slots__ = ("model", "layout", "placement_hash", "slot_owner", "load", "load_steps", "balancedness", "phase", "layers_done", "layers_total", "rebalances", "last_failure", "moved_bytes", "moved_rows", "least_rows", "is_paused", "is_disabled", "steps_to_trigger", "feasible", "imported_hash")
    class RebalancesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_HASH_FIELD_NUMBER: _ClassVar[int]
    SLOT_OWNER_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    LOAD_STEPS_FIELD_NUMBER: _ClassVar[int]
    BALANCEDNESS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_DONE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    REBALANCES_FIELD_NUMBER: _ClassVar[int]
    LAST_FAILURE_FIELD_NUMBER: _ClassVar[int]
    MOVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MOVED_ROWS_FIELD_NUMBER: _ClassVar[int]
    LEAST_ROWS_FIELD_NUMBER: _ClassVar[int]
    IS_PAUSED_FIELD_NUMBER: _ClassVar[int]
    IS_DISABLED_FIELD_NUMBER: _ClassVar[int]
    STEPS_TO_TRIGGER_FIELD_NUMBER: _ClassVar[int]
    FEASIBLE_FIELD_NUMBER: _ClassVar[int]
    IMPORTED_HASH_FIELD_NUMBER: _ClassVar[int]
    model: str
    layout: ExpertLayout
    placement_hash: int
    slot_owner: Int32Array
    load: Int64Array
    load_steps: int
    balancedness: float
    phase: str
    layers_done: int
    layers_total: int
    rebalances: _containers.ScalarMap[str, int]
    last_failure: str
    moved_bytes: int
    moved_rows: int
    least_rows: int
    is_paused: bool
    is_disabled: bool
    steps_to_trigger: int
    feasible: float
    imported_hash: int
    def __init__(self, model: _Optional[str] = ..., layout: _Optional[_Union[ExpertLayout, _Mapping]] = ..., placement_hash: _Optional[int] = ..., slot_owner: _Optional[_Union[Int32Array, _Mapping]] = ..., load: _Optional[_Union[Int64Array, _Mapping]] = ..., load_steps: _Optional[int] = ..., balancedness: _Optional[float] = ..., phase: _Optional[str] = ..., layers_done: _Optional[int] = ..., layers_total: _Optional[int] = ..., rebalances: _Optional[_Mapping[str, int]] = ..., last_failure: _Optional[str] = ..., moved_bytes: _Optional[int] = ..., moved_rows: _Optional[int] = ..., least_rows: _Optional[int] = ..., is_paused: _Optional[bool] = ..., is_disabled: _Optional[bool] = ..., steps_to_trigger: _Optional[int] = ..., feasible: _Optional[float] = ..., imported_hash: _Optional[int] = ...) -> None: ...

class ExpertLayout(_message.Message):
    __slots__ = ("num_layers", "num_experts", "ranks", "num_redundant_experts", "max_copies_per_expert", "num_groups", "num_nodes", "num_slots")
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    NUM_REDUNDANT_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    MAX_COPIES_PER_EXPERT_FIELD_NUMBER: _ClassVar[int]
    NUM_GROUPS_FIELD_NUMBER: _ClassVar[int]
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    num_layers: int
    num_experts: int
    ranks: int
    num_redundant_experts: int
    max_copies_per_expert: int
    num_groups: int
    num_nodes: int
    num_slots: int
    def __init__(self, num_layers: _Optional[int] = ..., num_experts: _Optional[int] = ..., ranks: _Optional[int] = ..., num_redundant_experts: _Optional[int] = ..., max_copies_per_expert: _Optional[int] = ..., num_groups: _Optional[int] = ..., num_nodes: _Optional[int] = ..., num_slots: _Optional[int] = ...) -> None: ...

class Int32Array(_message.Message):
    __slots__ = ("shape", "values")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    values: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, shape: _Optional[_Iterable[int]] = ..., values: _Optional[_Iterable[int]] = ...) -> None: ...

class Int64Array(_message.Message):
    __slots__ = ("shape", "values")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    values: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, shape: _Optional[_Iterable[int]] = ..., values: _Optional[_Iterable[int]] = ...) -> None: ...

class RebalanceRequest(_message.Message):
    __slots__ = ("steps", "model")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    steps: int
    model: str
    def __init__(self, steps: _Optional[int] = ..., model: _Optional[str] = ...) -> None: ...

class RebalanceResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseRebalancingRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class PauseRebalancingResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRebalancingRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ResumeRebalancingResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExportPlacementRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ExportPlacementResponse(_message.Message):
    __slots__ = ("placement_json", "placement_hash")
    PLACEMENT_JSON_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_HASH_FIELD_NUMBER: _ClassVar[int]
    placement_json: str
    placement_hash: int
    def __init__(self, placement_json: _Optional[str] = ..., placement_hash: _Optional[int] = ...) -> None: ...

class ImportPlacementRequest(_message.Message):
    __slots__ = ("placement_json", "model")
    PLACEMENT_JSON_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    placement_json: str
    model: str
    def __init__(self, placement_json: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class ImportPlacementResponse(_message.Message):
    __slots__ = ("placement_hash",)
    PLACEMENT_HASH_FIELD_NUMBER: _ClassVar[int]
    placement_hash: int
    def __init__(self, placement_hash: _Optional[int] = ...) -> None: ...
