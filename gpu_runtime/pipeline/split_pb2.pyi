from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionKey(_message.Message):
    __slots__ = ("run", "server_round", "attempt", "client", "task")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SERVER_ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    run: str
    server_round: int
    attempt: int
    client: str
    task: str
    def __init__(self, run: _Optional[str] = ..., server_round: _Optional[int] = ..., attempt: _Optional[int] = ..., client: _Optional[str] = ..., task: _Optional[str] = ...) -> None: ...

class SessionSpec(_message.Message):
    __slots__ = ("key", "split_point", "micro_batches", "encoding", "num_examples", "batch_size", "seed", "learning_rate", "proximal_mu")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SPLIT_POINT_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    NUM_EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    PROXIMAL_MU_FIELD_NUMBER: _ClassVar[int]
    key: SessionKey
    split_point: int
    micro_batches: int
    encoding: str
    num_examples: int
    batch_size: int
    seed: int
    learning_rate: float
    proximal_mu: float
    def __init__(self, key: _Optional[_Union[SessionKey, _Mapping]] = ..., split_point: _Optional[int] = ..., micro_batches: _Optional[int] = ..., encoding: _Optional[str] = ..., num_examples: _Optional[int] = ..., batch_size: _Optional[int] = ..., seed: _Optional[int] = ..., learning_rate: _Optional[float] = ..., proximal_mu: _Optional[float] = ...) -> None: ...

class SessionEnd(_message.Message):
    __slots__ = ("num_steps", "num_examples")
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    num_examples: int
    def __init__(self, num_steps: _Optional[int] = ..., num_examples: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("token", "nonce", "spec", "num_gradients", "resumes")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    NUM_GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    RESUMES_FIELD_NUMBER: _ClassVar[int]
    token: str
    nonce: str
    spec: SessionSpec
    num_gradients: int
    resumes: bool
    def __init__(self, token: _Optional[str] = ..., nonce: _Optional[str] = ..., spec: _Optional[_Union[SessionSpec, _Mapping]] = ..., num_gradients: _Optional[int] = ..., resumes: bool = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("num_micro_batches",)
    NUM_MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    num_micro_batches: int
    def __init__(self, num_micro_batches: _Optional[int] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("encoding", "dtype", "shape", "data_bytes", "scale_bytes", "absent")
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_BYTES_FIELD_NUMBER: _ClassVar[int]
    SCALE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    encoding: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    data_bytes: int
    scale_bytes: int
    absent: bool
    def __init__(self, encoding: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data_bytes: _Optional[int] = ..., scale_bytes: _Optional[int] = ..., absent: bool = ...) -> None: ...

class Activation(_message.Message):
    __slots__ = ("count", "num_examples", "batch_examples", "tensors", "structure", "targets", "target_structure")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    NUM_EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    BATCH_EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURE_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    TARGET_STRUCTURE_FIELD_NUMBER: _ClassVar[int]
    count: int
    num_examples: int
    batch_examples: int
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    structure: str
    targets: _containers.RepeatedCompositeFieldContainer[Tensor]
    target_structure: str
    def __init__(self, count: _Optional[int] = ..., num_examples: _Optional[int] = ..., batch_examples: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., structure: _Optional[str] = ..., targets: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., target_structure: _Optional[str] = ...) -> None: ...

class Gradient(_message.Message):
    __slots__ = ("loss", "server_s", "tensors", "arrived_s", "queued_s", "held_up")
    LOSS_FIELD_NUMBER: _ClassVar[int]
    SERVER_S_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_S_FIELD_NUMBER: _ClassVar[int]
    QUEUED_S_FIELD_NUMBER: _ClassVar[int]
    HELD_UP_FIELD_NUMBER: _ClassVar[int]
    loss: float
    server_s: float
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    arrived_s: float
    queued_s: float
    held_up: bool
    def __init__(self, loss: _Optional[float] = ..., server_s: _Optional[float] = ..., tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., arrived_s: _Optional[float] = ..., queued_s: _Optional[float] = ..., held_up: bool = ...) -> None: ...

class Bundle(_message.Message):
    __slots__ = ("run", "server_round", "task", "reference", "spec", "names", "tensors", "end")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SERVER_ROUND_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    run: str
    server_round: int
    task: str
    reference: str
    spec: str
    names: _containers.RepeatedScalarFieldContainer[str]
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    end: SessionEnd
    def __init__(self, run: _Optional[str] = ..., server_round: _Optional[int] = ..., task: _Optional[str] = ..., reference: _Optional[str] = ..., spec: _Optional[str] = ..., names: _Optional[_Iterable[str]] = ..., tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., end: _Optional[_Union[SessionEnd, _Mapping]] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("step", "index", "number", "count", "total_bytes", "activation", "gradient", "bundle")
    STEP_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    step: int
    index: int
    number: int
    count: int
    total_bytes: int
    activation: Activation
    gradient: Gradient
    bundle: Bundle
    def __init__(self, step: _Optional[int] = ..., index: _Optional[int] = ..., number: _Optional[int] = ..., count: _Optional[int] = ..., total_bytes: _Optional[int] = ..., activation: _Optional[_Union[Activation, _Mapping]] = ..., gradient: _Optional[_Union[Gradient, _Mapping]] = ..., bundle: _Optional[_Union[Bundle, _Mapping]] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("number", "reply_bytes")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REPLY_BYTES_FIELD_NUMBER: _ClassVar[int]
    number: int
    reply_bytes: int
    def __init__(self, number: _Optional[int] = ..., reply_bytes: _Optional[int] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class Abandon(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Failure(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class ClientFrame(_message.Message):
    __slots__ = ("hello", "piece", "ping", "finish", "abandon", "padding", "payload")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    ABANDON_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    piece: Piece
    ping: Ping
    finish: SessionEnd
    abandon: Abandon
    padding: bytes
    payload: bytes
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., piece: _Optional[_Union[Piece, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., finish: _Optional[_Union[SessionEnd, _Mapping]] = ..., abandon: _Optional[_Union[Abandon, _Mapping]] = ..., padding: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...

class ServerFrame(_message.Message):
    __slots__ = ("welcome", "piece", "pong", "done", "failure", "padding", "payload")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    piece: Piece
    pong: Pong
    done: SessionEnd
    failure: Failure
    padding: bytes
    payload: bytes
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., piece: _Optional[_Union[Piece, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., done: _Optional[_Union[SessionEnd, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., padding: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...

class RoundId(_message.Message):
    __slots__ = ("run", "server_round")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SERVER_ROUND_FIELD_NUMBER: _ClassVar[int]
    run: str
    server_round: int
    def __init__(self, run: _Optional[str] = ..., server_round: _Optional[int] = ...) -> None: ...

class Measure(_message.Message):
    __slots__ = ("tasks",)
    TASKS_FIELD_NUMBER: _ClassVar[int]
    tasks: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tasks: _Optional[_Iterable[str]] = ...) -> None: ...

class Measured(_message.Message):
    __slots__ = ("profile",)
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    profile: str
    def __init__(self, profile: _Optional[str] = ...) -> None: ...

class AdminFrame(_message.Message):
    __slots__ = ("token", "piece", "collect", "release", "failure", "measure", "measured", "padding", "payload")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    COLLECT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    MEASURE_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    token: str
    piece: Piece
    collect: SessionKey
    release: RoundId
    failure: Failure
    measure: Measure
    measured: Measured
    padding: bytes
    payload: bytes
    def __init__(self, token: _Optional[str] = ..., piece: _Optional[_Union[Piece, _Mapping]] = ..., collect: _Optional[_Union[SessionKey, _Mapping]] = ..., release: _Optional[_Union[RoundId, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., measure: _Optional[_Union[Measure, _Mapping]] = ..., measured: _Optional[_Union[Measured, _Mapping]] = ..., padding: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...
