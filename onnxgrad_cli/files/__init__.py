"""Read and write models and other files, with clear errors for damaged files and without half-written outputs.

External data are not loaded into memory: they stay references, and files that must be copied are copied as streams.
"""

from onnxgrad_cli.files.external_data import (
    check_external_data as check_external_data,
    load_external_data as load_external_data,
    without_links as without_links,
)
from onnxgrad_cli.files.outputs import (
    check_apart as check_apart,
    check_folder as check_folder,
    check_target as check_target,
    is_special as is_special,
    make_folder as make_folder,
    resolve_output as resolve_output,
    told as told,
)
from onnxgrad_cli.files.reading import (
    STREAM as STREAM,
    ModelSource as ModelSource,
    check_exists as check_exists,
    is_read_once as is_read_once,
    load_model as load_model,
    own_model as own_model,
    read_model as read_model,
)
from onnxgrad_cli.files.transaction import (
    AtomicWriteGroup as AtomicWriteGroup,
    hold as hold,
    opened as opened,
    tidy as tidy,
)
from onnxgrad_cli.files.validation import check_structure as check_structure
from onnxgrad_cli.files.writing import (
    mark as mark,
    save_bytes as save_bytes,
    save_model as save_model,
    stage_model as stage_model,
)
