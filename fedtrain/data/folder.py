"""Where data sets lie that are too large for the package, or not ours to ship."""

import os
from pathlib import Path

from fedtrain.errors import DataError

VARIABLE = "FEDTRAIN_DATA"
"""Environment variable that names the folder of all data sets."""


def data_folder(name: str, path: str | os.PathLike[str] | None = None) -> Path:
    """The folder of a data set: `path`, else `name` in the folder that FEDTRAIN_DATA names, else in ``../shared/data``.

    Raises:
        DataError: there is no such folder.
    """
    found = Path(os.environ.get(VARIABLE, "../shared/data")) / name if path is None else Path(path)
    if not found.is_dir():
        raise DataError(
            f"the data set {name} is expected in the folder {found.absolute()}, which does not exist: "
            f"set the environment variable {VARIABLE} to the folder that {name} lies in, or data.path"
        )
    return found
