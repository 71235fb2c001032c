"""Models in and out of files: whatever is wrong with a file is said plainly, and nothing half-written stays.

Weights are never loaded: external data stay references; where they must travel, they are copied as a stream.
"""

from onnxgrad_cli.files.external_data import (
    check_external_data as check_external_data,
    load_external_data as load_external_data,
    tensors as tensors,
    without_links as without_links,
)
from onnxgrad_cli.files.locking import hold as hold, opened as opened
from onnxgrad_cli.files.outputs import check_is_file as check_is_file, followed as followed
from onnxgrad_cli.files.reading import (
    STREAM as STREAM,
    ModelSource as ModelSource,
    check_structure as check_structure,
    is_read_once as is_read_once,
    load_model as load_model,
    own_model as own_model,
    read_model as read_model,
)
from onnxgrad_cli.files.switch import (
    Switch as Switch,
    check_apart as check_apart,
    is_special as is_special,
    tidy as tidy,
    told as told,
)
from onnxgrad_cli.files.writing import (
    check_folder as check_folder,
    check_target as check_target,
    make_folder as make_folder,
    mark as mark,
    save_bytes as save_bytes,
    save_model as save_model,
    stage_model as stage_model,
)
