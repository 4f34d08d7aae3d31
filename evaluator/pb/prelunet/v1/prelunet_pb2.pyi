from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ClassifyRequest(_message.Message):
    __slots__ = ("image", "model", "protocol", "top_k", "heatmap", "apply_exif", "scales", "mirror", "maps")
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    HEATMAP_FIELD_NUMBER: _ClassVar[int]
    APPLY_EXIF_FIELD_NUMBER: _ClassVar[int]
    SCALES_FIELD_NUMBER: _ClassVar[int]
    MIRROR_FIELD_NUMBER: _ClassVar[int]
    MAPS_FIELD_NUMBER: _ClassVar[int]
    image: bytes
    model: str
    protocol: str
    top_k: int
    heatmap: bool
    apply_exif: bool
    scales: _containers.RepeatedScalarFieldContainer[int]
    mirror: bool
    maps: bool
    def __init__(self, image: _Optional[bytes] = ..., model: _Optional[str] = ..., protocol: _Optional[str] = ..., top_k: _Optional[int] = ..., heatmap: _Optional[bool] = ..., apply_exif: _Optional[bool] = ..., scales: _Optional[_Iterable[int]] = ..., mirror: _Optional[bool] = ..., maps: _Optional[bool] = ...) -> None: ...

class ClassifyResponse(_message.Message):
    __slots__ = ("predictions", "model", "protocol", "views", "capped", "circumstances", "heatmap", "timings", "maps")
    PREDICTIONS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    VIEWS_FIELD_NUMBER: _ClassVar[int]
    CAPPED_FIELD_NUMBER: _ClassVar[int]
    CIRCUMSTANCES_FIELD_NUMBER: _ClassVar[int]
    HEATMAP_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    MAPS_FIELD_NUMBER: _ClassVar[int]
    predictions: _containers.RepeatedCompositeFieldContainer[Prediction]
    model: ModelIdentity
    protocol: Protocol
    views: _containers.RepeatedCompositeFieldContainer[View]
    capped: bool
    circumstances: Circumstances
    heatmap: bytes
    timings: Timings
    maps: _containers.RepeatedCompositeFieldContainer[HeatMap]
    def __init__(self, predictions: _Optional[_Iterable[_Union[Prediction, _Mapping]]] = ..., model: _Optional[_Union[ModelIdentity, _Mapping]] = ..., protocol: _Optional[_Union[Protocol, _Mapping]] = ..., views: _Optional[_Iterable[_Union[View, _Mapping]]] = ..., capped: _Optional[bool] = ..., circumstances: _Optional[_Union[Circumstances, _Mapping]] = ..., heatmap: _Optional[bytes] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., maps: _Optional[_Iterable[_Union[HeatMap, _Mapping]]] = ...) -> None: ...

class HeatMap(_message.Message):
    __slots__ = ("class_index", "rows", "columns", "scores", "image_height", "image_width")
    CLASS_INDEX_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    IMAGE_HEIGHT_FIELD_NUMBER: _ClassVar[int]
    IMAGE_WIDTH_FIELD_NUMBER: _ClassVar[int]
    class_index: int
    rows: int
    columns: int
    scores: _containers.RepeatedScalarFieldContainer[float]
    image_height: int
    image_width: int
    def __init__(self, class_index: _Optional[int] = ..., rows: _Optional[int] = ..., columns: _Optional[int] = ..., scores: _Optional[_Iterable[float]] = ..., image_height: _Optional[int] = ..., image_width: _Optional[int] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_seconds", "decode_seconds", "compute_seconds", "total_seconds", "batches")
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DECODE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    queue_seconds: float
    decode_seconds: float
    compute_seconds: float
    total_seconds: float
    batches: int
    def __init__(self, queue_seconds: _Optional[float] = ..., decode_seconds: _Optional[float] = ..., compute_seconds: _Optional[float] = ..., total_seconds: _Optional[float] = ..., batches: _Optional[int] = ...) -> None: ...

class ClassifyStreamRequest(_message.Message):
    __slots__ = ("id", "request")
    ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    id: str
    request: ClassifyRequest
    def __init__(self, id: _Optional[str] = ..., request: _Optional[_Union[ClassifyRequest, _Mapping]] = ...) -> None: ...

class ClassifyStreamResponse(_message.Message):
    __slots__ = ("id", "response", "error")
    ID_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    id: str
    response: ClassifyResponse
    error: CallError
    def __init__(self, id: _Optional[str] = ..., response: _Optional[_Union[ClassifyResponse, _Mapping]] = ..., error: _Optional[_Union[CallError, _Mapping]] = ...) -> None: ...

class CallError(_message.Message):
    __slots__ = ("code", "reason", "message", "retry_after_seconds")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    message: str
    retry_after_seconds: float
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., retry_after_seconds: _Optional[float] = ...) -> None: ...

class Prediction(_message.Message):
    __slots__ = ("class_index", "wnid", "name", "score")
    CLASS_INDEX_FIELD_NUMBER: _ClassVar[int]
    WNID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    class_index: int
    wnid: str
    name: str
    score: float
    def __init__(self, class_index: _Optional[int] = ..., wnid: _Optional[str] = ..., name: _Optional[str] = ..., score: _Optional[float] = ...) -> None: ...

class ModelIdentity(_message.Message):
    __slots__ = ("name", "sha256", "version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    sha256: str
    version: int
    def __init__(self, name: _Optional[str] = ..., sha256: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class View(_message.Message):
    __slots__ = ("scale", "mirrored", "part", "windows")
    SCALE_FIELD_NUMBER: _ClassVar[int]
    MIRRORED_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    scale: int
    mirrored: bool
    part: str
    windows: WindowGrid
    def __init__(self, scale: _Optional[int] = ..., mirrored: _Optional[bool] = ..., part: _Optional[str] = ..., windows: _Optional[_Union[WindowGrid, _Mapping]] = ...) -> None: ...

class WindowGrid(_message.Message):
    __slots__ = ("rows", "columns")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    rows: int
    columns: int
    def __init__(self, rows: _Optional[int] = ..., columns: _Optional[int] = ...) -> None: ...

class Protocol(_message.Message):
    __slots__ = ("name", "kind", "scales", "mirror", "averaging", "weights", "long_side_cap", "crop", "interpolation", "apply_exif", "preparation")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SCALES_FIELD_NUMBER: _ClassVar[int]
    MIRROR_FIELD_NUMBER: _ClassVar[int]
    AVERAGING_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    LONG_SIDE_CAP_FIELD_NUMBER: _ClassVar[int]
    CROP_FIELD_NUMBER: _ClassVar[int]
    INTERPOLATION_FIELD_NUMBER: _ClassVar[int]
    APPLY_EXIF_FIELD_NUMBER: _ClassVar[int]
    PREPARATION_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: str
    scales: _containers.RepeatedScalarFieldContainer[int]
    mirror: bool
    averaging: str
    weights: str
    long_side_cap: int
    crop: int
    interpolation: str
    apply_exif: bool
    preparation: Preparation
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., scales: _Optional[_Iterable[int]] = ..., mirror: _Optional[bool] = ..., averaging: _Optional[str] = ..., weights: _Optional[str] = ..., long_side_cap: _Optional[int] = ..., crop: _Optional[int] = ..., interpolation: _Optional[str] = ..., apply_exif: _Optional[bool] = ..., preparation: _Optional[_Union[Preparation, _Mapping]] = ...) -> None: ...

class Preparation(_message.Message):
    __slots__ = ("resize", "antialias", "rounding", "pad_color", "transparency", "gray")
    RESIZE_FIELD_NUMBER: _ClassVar[int]
    ANTIALIAS_FIELD_NUMBER: _ClassVar[int]
    ROUNDING_FIELD_NUMBER: _ClassVar[int]
    PAD_COLOR_FIELD_NUMBER: _ClassVar[int]
    TRANSPARENCY_FIELD_NUMBER: _ClassVar[int]
    GRAY_FIELD_NUMBER: _ClassVar[int]
    resize: str
    antialias: str
    rounding: str
    pad_color: _containers.RepeatedScalarFieldContainer[int]
    transparency: str
    gray: bool
    def __init__(self, resize: _Optional[str] = ..., antialias: _Optional[str] = ..., rounding: _Optional[str] = ..., pad_color: _Optional[_Iterable[int]] = ..., transparency: _Optional[str] = ..., gray: _Optional[bool] = ...) -> None: ...

class Circumstances(_message.Message):
    __slots__ = ("provider", "precision", "versions")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROVIDER_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    provider: str
    precision: str
    versions: _containers.ScalarMap[str, str]
    def __init__(self, provider: _Optional[str] = ..., precision: _Optional[str] = ..., versions: _Optional[_Mapping[str, str]] = ...) -> None: ...

class EvaluateRequest(_message.Message):
    __slots__ = ("start", "image")
    START_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    start: EvaluateStart
    image: LabelledImage
    def __init__(self, start: _Optional[_Union[EvaluateStart, _Mapping]] = ..., image: _Optional[_Union[LabelledImage, _Mapping]] = ...) -> None: ...

class EvaluateStart(_message.Message):
    __slots__ = ("model", "protocol", "dataset", "apply_exif", "scales", "mirror")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    APPLY_EXIF_FIELD_NUMBER: _ClassVar[int]
    SCALES_FIELD_NUMBER: _ClassVar[int]
    MIRROR_FIELD_NUMBER: _ClassVar[int]
    model: str
    protocol: str
    dataset: str
    apply_exif: bool
    scales: _containers.RepeatedScalarFieldContainer[int]
    mirror: bool
    def __init__(self, model: _Optional[str] = ..., protocol: _Optional[str] = ..., dataset: _Optional[str] = ..., apply_exif: _Optional[bool] = ..., scales: _Optional[_Iterable[int]] = ..., mirror: _Optional[bool] = ...) -> None: ...

class LabelledImage(_message.Message):
    __slots__ = ("file", "data", "label", "wnid")
    FILE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    WNID_FIELD_NUMBER: _ClassVar[int]
    file: str
    data: bytes
    label: int
    wnid: str
    def __init__(self, file: _Optional[str] = ..., data: _Optional[bytes] = ..., label: _Optional[int] = ..., wnid: _Optional[str] = ...) -> None: ...

class EvaluateResponse(_message.Message):
    __slots__ = ("report", "progress")
    REPORT_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    report: Report
    progress: EvaluateProgress
    def __init__(self, report: _Optional[_Union[Report, _Mapping]] = ..., progress: _Optional[_Union[EvaluateProgress, _Mapping]] = ...) -> None: ...

class EvaluateProgress(_message.Message):
    __slots__ = ("images", "refused", "top1_error", "seconds")
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    TOP1_ERROR_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    images: int
    refused: int
    top1_error: float
    seconds: float
    def __init__(self, images: _Optional[int] = ..., refused: _Optional[int] = ..., top1_error: _Optional[float] = ..., seconds: _Optional[float] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models", "problems")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelIdentity]
    problems: _containers.RepeatedCompositeFieldContainer[VersionProblem]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelIdentity, _Mapping]]] = ..., problems: _Optional[_Iterable[_Union[VersionProblem, _Mapping]]] = ...) -> None: ...

class VersionProblem(_message.Message):
    __slots__ = ("name", "version", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: int
    reason: str
    def __init__(self, name: _Optional[str] = ..., version: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: Model
    def __init__(self, model: _Optional[_Union[Model, _Mapping]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "sha256", "architecture", "activation", "classes", "crop", "default_scales", "max_side", "canvas", "circumstances", "checkpoint_sha256", "protocols", "version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    CROP_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SCALES_FIELD_NUMBER: _ClassVar[int]
    MAX_SIDE_FIELD_NUMBER: _ClassVar[int]
    CANVAS_FIELD_NUMBER: _ClassVar[int]
    CIRCUMSTANCES_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_SHA256_FIELD_NUMBER: _ClassVar[int]
    PROTOCOLS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    sha256: str
    architecture: str
    activation: str
    classes: _containers.RepeatedCompositeFieldContainer[ClassEntry]
    crop: int
    default_scales: _containers.RepeatedScalarFieldContainer[int]
    max_side: int
    canvas: str
    circumstances: Circumstances
    checkpoint_sha256: str
    protocols: _containers.RepeatedScalarFieldContainer[str]
    version: int
    def __init__(self, name: _Optional[str] = ..., sha256: _Optional[str] = ..., architecture: _Optional[str] = ..., activation: _Optional[str] = ..., classes: _Optional[_Iterable[_Union[ClassEntry, _Mapping]]] = ..., crop: _Optional[int] = ..., default_scales: _Optional[_Iterable[int]] = ..., max_side: _Optional[int] = ..., canvas: _Optional[str] = ..., circumstances: _Optional[_Union[Circumstances, _Mapping]] = ..., checkpoint_sha256: _Optional[str] = ..., protocols: _Optional[_Iterable[str]] = ..., version: _Optional[int] = ...) -> None: ...

class ClassEntry(_message.Message):
    __slots__ = ("wnid", "name")
    WNID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    wnid: str
    name: str
    def __init__(self, wnid: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("version", "images", "evaluated", "refused", "capped", "top1_wrong", "top1_error", "top1_interval", "top5_wrong", "top5_error", "top5_interval", "macro", "calibration", "risk_coverage", "ranks", "views", "scales", "mirrors", "model", "protocol", "dataset", "circumstances", "members", "classes", "confusions", "worst", "same_names", "suspicion", "refusals")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    EVALUATED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    CAPPED_FIELD_NUMBER: _ClassVar[int]
    TOP1_WRONG_FIELD_NUMBER: _ClassVar[int]
    TOP1_ERROR_FIELD_NUMBER: _ClassVar[int]
    TOP1_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    TOP5_WRONG_FIELD_NUMBER: _ClassVar[int]
    TOP5_ERROR_FIELD_NUMBER: _ClassVar[int]
    TOP5_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    MACRO_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_FIELD_NUMBER: _ClassVar[int]
    RISK_COVERAGE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    VIEWS_FIELD_NUMBER: _ClassVar[int]
    SCALES_FIELD_NUMBER: _ClassVar[int]
    MIRRORS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    CIRCUMSTANCES_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    CONFUSIONS_FIELD_NUMBER: _ClassVar[int]
    WORST_FIELD_NUMBER: _ClassVar[int]
    SAME_NAMES_FIELD_NUMBER: _ClassVar[int]
    SUSPICION_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    version: int
    images: int
    evaluated: int
    refused: int
    capped: int
    top1_wrong: int
    top1_error: float
    top1_interval: _containers.RepeatedScalarFieldContainer[float]
    top5_wrong: int
    top5_error: float
    top5_interval: _containers.RepeatedScalarFieldContainer[float]
    macro: MacroErrors
    calibration: Calibration
    risk_coverage: RiskCoverage
    ranks: Ranks
    views: _containers.RepeatedCompositeFieldContainer[ReportView]
    scales: _containers.RepeatedCompositeFieldContainer[ReportScale]
    mirrors: _containers.RepeatedCompositeFieldContainer[ReportMirror]
    model: ReportModel
    protocol: Protocol
    dataset: ReportDataset
    circumstances: Circumstances
    members: _containers.RepeatedCompositeFieldContainer[ReportMember]
    classes: _containers.RepeatedCompositeFieldContainer[ReportClass]
    confusions: _containers.RepeatedCompositeFieldContainer[ReportConfusion]
    worst: WorstClasses
    same_names: _containers.RepeatedCompositeFieldContainer[WholeNumbers]
    suspicion: str
    refusals: _containers.RepeatedCompositeFieldContainer[Refusal]
    def __init__(self, version: _Optional[int] = ..., images: _Optional[int] = ..., evaluated: _Optional[int] = ..., refused: _Optional[int] = ..., capped: _Optional[int] = ..., top1_wrong: _Optional[int] = ..., top1_error: _Optional[float] = ..., top1_interval: _Optional[_Iterable[float]] = ..., top5_wrong: _Optional[int] = ..., top5_error: _Optional[float] = ..., top5_interval: _Optional[_Iterable[float]] = ..., macro: _Optional[_Union[MacroErrors, _Mapping]] = ..., calibration: _Optional[_Union[Calibration, _Mapping]] = ..., risk_coverage: _Optional[_Union[RiskCoverage, _Mapping]] = ..., ranks: _Optional[_Union[Ranks, _Mapping]] = ..., views: _Optional[_Iterable[_Union[ReportView, _Mapping]]] = ..., scales: _Optional[_Iterable[_Union[ReportScale, _Mapping]]] = ..., mirrors: _Optional[_Iterable[_Union[ReportMirror, _Mapping]]] = ..., model: _Optional[_Union[ReportModel, _Mapping]] = ..., protocol: _Optional[_Union[Protocol, _Mapping]] = ..., dataset: _Optional[_Union[ReportDataset, _Mapping]] = ..., circumstances: _Optional[_Union[Circumstances, _Mapping]] = ..., members: _Optional[_Iterable[_Union[ReportMember, _Mapping]]] = ..., classes: _Optional[_Iterable[_Union[ReportClass, _Mapping]]] = ..., confusions: _Optional[_Iterable[_Union[ReportConfusion, _Mapping]]] = ..., worst: _Optional[_Union[WorstClasses, _Mapping]] = ..., same_names: _Optional[_Iterable[_Union[WholeNumbers, _Mapping]]] = ..., suspicion: _Optional[str] = ..., refusals: _Optional[_Iterable[_Union[Refusal, _Mapping]]] = ...) -> None: ...

class WholeNumbers(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, values: _Optional[_Iterable[int]] = ...) -> None: ...

class MacroErrors(_message.Message):
    __slots__ = ("classes", "top1_error", "top1_interval", "top5_error", "top5_interval")
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    TOP1_ERROR_FIELD_NUMBER: _ClassVar[int]
    TOP1_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    TOP5_ERROR_FIELD_NUMBER: _ClassVar[int]
    TOP5_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    classes: int
    top1_error: float
    top1_interval: _containers.RepeatedScalarFieldContainer[float]
    top5_error: float
    top5_interval: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, classes: _Optional[int] = ..., top1_error: _Optional[float] = ..., top1_interval: _Optional[_Iterable[float]] = ..., top5_error: _Optional[float] = ..., top5_interval: _Optional[_Iterable[float]] = ...) -> None: ...

class Calibration(_message.Message):
    __slots__ = ("confidence", "expected_error", "bins", "histogram")
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_ERROR_FIELD_NUMBER: _ClassVar[int]
    BINS_FIELD_NUMBER: _ClassVar[int]
    HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    confidence: float
    expected_error: float
    bins: _containers.RepeatedCompositeFieldContainer[CalibrationBin]
    histogram: _containers.RepeatedCompositeFieldContainer[HistogramBin]
    def __init__(self, confidence: _Optional[float] = ..., expected_error: _Optional[float] = ..., bins: _Optional[_Iterable[_Union[CalibrationBin, _Mapping]]] = ..., histogram: _Optional[_Iterable[_Union[HistogramBin, _Mapping]]] = ...) -> None: ...

class CalibrationBin(_message.Message):
    __slots__ = ("low", "high", "images", "confidence", "accuracy")
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_FIELD_NUMBER: _ClassVar[int]
    low: float
    high: float
    images: int
    confidence: float
    accuracy: float
    def __init__(self, low: _Optional[float] = ..., high: _Optional[float] = ..., images: _Optional[int] = ..., confidence: _Optional[float] = ..., accuracy: _Optional[float] = ...) -> None: ...

class HistogramBin(_message.Message):
    __slots__ = ("low", "high", "right", "wrong")
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    RIGHT_FIELD_NUMBER: _ClassVar[int]
    WRONG_FIELD_NUMBER: _ClassVar[int]
    low: float
    high: float
    right: int
    wrong: int
    def __init__(self, low: _Optional[float] = ..., high: _Optional[float] = ..., right: _Optional[int] = ..., wrong: _Optional[int] = ...) -> None: ...

class RiskCoverage(_message.Message):
    __slots__ = ("area", "points")
    AREA_FIELD_NUMBER: _ClassVar[int]
    POINTS_FIELD_NUMBER: _ClassVar[int]
    area: float
    points: _containers.RepeatedCompositeFieldContainer[RiskPoint]
    def __init__(self, area: _Optional[float] = ..., points: _Optional[_Iterable[_Union[RiskPoint, _Mapping]]] = ...) -> None: ...

class RiskPoint(_message.Message):
    __slots__ = ("threshold", "images", "coverage", "top1_wrong", "top1_error", "top1_interval")
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    COVERAGE_FIELD_NUMBER: _ClassVar[int]
    TOP1_WRONG_FIELD_NUMBER: _ClassVar[int]
    TOP1_ERROR_FIELD_NUMBER: _ClassVar[int]
    TOP1_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    threshold: float
    images: int
    coverage: float
    top1_wrong: int
    top1_error: float
    top1_interval: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, threshold: _Optional[float] = ..., images: _Optional[int] = ..., coverage: _Optional[float] = ..., top1_wrong: _Optional[int] = ..., top1_error: _Optional[float] = ..., top1_interval: _Optional[_Iterable[float]] = ...) -> None: ...

class Ranks(_message.Message):
    __slots__ = ("median", "mean", "mean_reciprocal", "counts")
    MEDIAN_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    MEAN_RECIPROCAL_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    median: float
    mean: float
    mean_reciprocal: float
    counts: _containers.RepeatedCompositeFieldContainer[RankCount]
    def __init__(self, median: _Optional[float] = ..., mean: _Optional[float] = ..., mean_reciprocal: _Optional[float] = ..., counts: _Optional[_Iterable[_Union[RankCount, _Mapping]]] = ...) -> None: ...

class RankCount(_message.Message):
    __slots__ = ("first", "last", "images")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    first: int
    last: int
    images: int
    def __init__(self, first: _Optional[int] = ..., last: _Optional[int] = ..., images: _Optional[int] = ...) -> None: ...

class WorstClasses(_message.Message):
    __slots__ = ("classes", "counts", "elsewhere")
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    classes: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedCompositeFieldContainer[WholeNumbers]
    elsewhere: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, classes: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[_Union[WholeNumbers, _Mapping]]] = ..., elsewhere: _Optional[_Iterable[int]] = ...) -> None: ...

class ReportMember(_message.Message):
    __slots__ = ("model", "weight")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    model: ReportModel
    weight: float
    def __init__(self, model: _Optional[_Union[ReportModel, _Mapping]] = ..., weight: _Optional[float] = ...) -> None: ...

class ReportModel(_message.Message):
    __slots__ = ("file", "sha256", "architecture", "activation", "provenance", "checkpoint_sha256", "calibration")
    FILE_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_SHA256_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_FIELD_NUMBER: _ClassVar[int]
    file: str
    sha256: str
    architecture: str
    activation: str
    provenance: ReportProvenance
    checkpoint_sha256: str
    calibration: ReportCalibration
    def __init__(self, file: _Optional[str] = ..., sha256: _Optional[str] = ..., architecture: _Optional[str] = ..., activation: _Optional[str] = ..., provenance: _Optional[_Union[ReportProvenance, _Mapping]] = ..., checkpoint_sha256: _Optional[str] = ..., calibration: _Optional[_Union[ReportCalibration, _Mapping]] = ...) -> None: ...

class ReportCalibration(_message.Message):
    __slots__ = ("dataset_fingerprint", "images", "protocol", "rule", "tolerance", "cost")
    DATASET_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    TOLERANCE_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    dataset_fingerprint: str
    images: int
    protocol: str
    rule: str
    tolerance: ReportDeviation
    cost: ReportDeviation
    def __init__(self, dataset_fingerprint: _Optional[str] = ..., images: _Optional[int] = ..., protocol: _Optional[str] = ..., rule: _Optional[str] = ..., tolerance: _Optional[_Union[ReportDeviation, _Mapping]] = ..., cost: _Optional[_Union[ReportDeviation, _Mapping]] = ...) -> None: ...

class ReportDeviation(_message.Message):
    __slots__ = ("scores", "logits")
    SCORES_FIELD_NUMBER: _ClassVar[int]
    LOGITS_FIELD_NUMBER: _ClassVar[int]
    scores: float
    logits: float
    def __init__(self, scores: _Optional[float] = ..., logits: _Optional[float] = ...) -> None: ...

class ReportProvenance(_message.Message):
    __slots__ = ("parent_sha256", "environments", "step", "total_steps", "dataset_fingerprint")
    PARENT_SHA256_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENTS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    DATASET_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    parent_sha256: str
    environments: _containers.RepeatedCompositeFieldContainer[ReportEnvironment]
    step: int
    total_steps: int
    dataset_fingerprint: str
    def __init__(self, parent_sha256: _Optional[str] = ..., environments: _Optional[_Iterable[_Union[ReportEnvironment, _Mapping]]] = ..., step: _Optional[int] = ..., total_steps: _Optional[int] = ..., dataset_fingerprint: _Optional[str] = ...) -> None: ...

class ReportEnvironment(_message.Message):
    __slots__ = ("from_step", "versions", "device", "processes", "threads", "precision", "deterministic", "cudnn_benchmark")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    FROM_STEP_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    CUDNN_BENCHMARK_FIELD_NUMBER: _ClassVar[int]
    from_step: int
    versions: _containers.ScalarMap[str, str]
    device: str
    processes: int
    threads: int
    precision: str
    deterministic: bool
    cudnn_benchmark: bool
    def __init__(self, from_step: _Optional[int] = ..., versions: _Optional[_Mapping[str, str]] = ..., device: _Optional[str] = ..., processes: _Optional[int] = ..., threads: _Optional[int] = ..., precision: _Optional[str] = ..., deterministic: _Optional[bool] = ..., cudnn_benchmark: _Optional[bool] = ...) -> None: ...

class ReportDataset(_message.Message):
    __slots__ = ("name", "fingerprint", "images", "layout", "selection")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SELECTION_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    images: int
    layout: str
    selection: str
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., images: _Optional[int] = ..., layout: _Optional[str] = ..., selection: _Optional[str] = ...) -> None: ...

class ReportView(_message.Message):
    __slots__ = ("scale", "mirrored", "part", "top1_error", "top5_error")
    SCALE_FIELD_NUMBER: _ClassVar[int]
    MIRRORED_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    TOP1_ERROR_FIELD_NUMBER: _ClassVar[int]
    TOP5_ERROR_FIELD_NUMBER: _ClassVar[int]
    scale: int
    mirrored: bool
    part: str
    top1_error: float
    top5_error: float
    def __init__(self, scale: _Optional[int] = ..., mirrored: _Optional[bool] = ..., part: _Optional[str] = ..., top1_error: _Optional[float] = ..., top5_error: _Optional[float] = ...) -> None: ...

class ReportScale(_message.Message):
    __slots__ = ("scale", "views", "top1_error", "top5_error")
    SCALE_FIELD_NUMBER: _ClassVar[int]
    VIEWS_FIELD_NUMBER: _ClassVar[int]
    TOP1_ERROR_FIELD_NUMBER: _ClassVar[int]
    TOP5_ERROR_FIELD_NUMBER: _ClassVar[int]
    scale: int
    views: int
    top1_error: float
    top5_error: float
    def __init__(self, scale: _Optional[int] = ..., views: _Optional[int] = ..., top1_error: _Optional[float] = ..., top5_error: _Optional[float] = ...) -> None: ...

class ReportMirror(_message.Message):
    __slots__ = ("mirrored", "views", "top1_error", "top5_error")
    MIRRORED_FIELD_NUMBER: _ClassVar[int]
    VIEWS_FIELD_NUMBER: _ClassVar[int]
    TOP1_ERROR_FIELD_NUMBER: _ClassVar[int]
    TOP5_ERROR_FIELD_NUMBER: _ClassVar[int]
    mirrored: bool
    views: int
    top1_error: float
    top5_error: float
    def __init__(self, mirrored: _Optional[bool] = ..., views: _Optional[int] = ..., top1_error: _Optional[float] = ..., top5_error: _Optional[float] = ...) -> None: ...

class ReportClass(_message.Message):
    __slots__ = ("index", "wnid", "name", "images", "evaluated", "refused", "top1_wrong", "top1_error", "top1_interval", "top5_wrong", "top5_error", "top5_interval", "confidence", "median_rank", "views", "confusions")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    WNID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    EVALUATED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    TOP1_WRONG_FIELD_NUMBER: _ClassVar[int]
    TOP1_ERROR_FIELD_NUMBER: _ClassVar[int]
    TOP1_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    TOP5_WRONG_FIELD_NUMBER: _ClassVar[int]
    TOP5_ERROR_FIELD_NUMBER: _ClassVar[int]
    TOP5_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    MEDIAN_RANK_FIELD_NUMBER: _ClassVar[int]
    VIEWS_FIELD_NUMBER: _ClassVar[int]
    CONFUSIONS_FIELD_NUMBER: _ClassVar[int]
    index: int
    wnid: str
    name: str
    images: int
    evaluated: int
    refused: int
    top1_wrong: int
    top1_error: float
    top1_interval: _containers.RepeatedScalarFieldContainer[float]
    top5_wrong: int
    top5_error: float
    top5_interval: _containers.RepeatedScalarFieldContainer[float]
    confidence: float
    median_rank: float
    views: _containers.RepeatedCompositeFieldContainer[ClassView]
    confusions: _containers.RepeatedCompositeFieldContainer[ClassConfusion]
    def __init__(self, index: _Optional[int] = ..., wnid: _Optional[str] = ..., name: _Optional[str] = ..., images: _Optional[int] = ..., evaluated: _Optional[int] = ..., refused: _Optional[int] = ..., top1_wrong: _Optional[int] = ..., top1_error: _Optional[float] = ..., top1_interval: _Optional[_Iterable[float]] = ..., top5_wrong: _Optional[int] = ..., top5_error: _Optional[float] = ..., top5_interval: _Optional[_Iterable[float]] = ..., confidence: _Optional[float] = ..., median_rank: _Optional[float] = ..., views: _Optional[_Iterable[_Union[ClassView, _Mapping]]] = ..., confusions: _Optional[_Iterable[_Union[ClassConfusion, _Mapping]]] = ...) -> None: ...

class ClassView(_message.Message):
    __slots__ = ("top1_error", "top5_error")
    TOP1_ERROR_FIELD_NUMBER: _ClassVar[int]
    TOP5_ERROR_FIELD_NUMBER: _ClassVar[int]
    top1_error: float
    top5_error: float
    def __init__(self, top1_error: _Optional[float] = ..., top5_error: _Optional[float] = ...) -> None: ...

class ClassConfusion(_message.Message):
    __slots__ = ("index", "wnid", "name", "count")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    WNID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    index: int
    wnid: str
    name: str
    count: int
    def __init__(self, index: _Optional[int] = ..., wnid: _Optional[str] = ..., name: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class ReportConfusion(_message.Message):
    __slots__ = ("label", "predicted", "count", "share")
    LABEL_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    label: int
    predicted: int
    count: int
    share: float
    def __init__(self, label: _Optional[int] = ..., predicted: _Optional[int] = ..., count: _Optional[int] = ..., share: _Optional[float] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("file", "reason")
    FILE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    file: str
    reason: str
    def __init__(self, file: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...
