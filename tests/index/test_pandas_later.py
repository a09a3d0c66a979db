"""pymilvus without pandas; each test runs in its own process, because imports last."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

BEGINNING = """
import sys
from memstream_server.adapters.milvus.pandas_later import NoPandas, pandas_later
with pandas_later():
    import pymilvus
from pymilvus.orm import schema, types
assert "pandas" not in sys.modules
assert "pyarrow" not in sys.modules
"""


def run(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("", id="nothing is used"),
        pytest.param(
            """
            assert schema.is_list_like([1]) and not schema.is_list_like(1)
            assert "pandas" in sys.modules
            """,
            id="a function is called",
        ),
        pytest.param(
            """
            frame = schema.pd.DataFrame({"number": [1, 2]})
            assert [str(field.dtype) for field in schema.construct_fields_from_dataframe(frame)] == ["5"]
            import pandas
            assert pandas.DataFrame is schema.pd.DataFrame and isinstance(frame, pandas.DataFrame)
            """,
            id="a class is used",
        ),
        pytest.param(
            """
            import pandas
            assert type(pandas.DataFrame) is type
            assert pandas.api.types.is_scalar(1) and pandas.DataFrame is schema.pd.DataFrame
            """,
            id="somebody imports pandas",
        ),
        pytest.param(
            """
            with pandas_later():
                import pandas
            assert pandas.__version__ and pandas.api.types.is_scalar(1)
            """,
            id="imported in there by somebody else",
        ),
        pytest.param(
            """
            sys.meta_path.insert(0, NoPandas())
            try:
                import pandas
            except ModuleNotFoundError as error:
                assert error.name == "pandas"
            else:
                raise AssertionError("pandas was imported")
            import pyarrow
            assert pyarrow.array([1, 2]).to_pylist() == [1, 2]
            assert "pandas" not in sys.modules
            """,
            id="it is kept out",
        ),
    ],
)
def test_pandas_is_imported_on_first_use(program: str) -> None:
    run(BEGINNING + textwrap.dedent(program))


def test_already_imported_pandas_stays() -> None:
    run("""
        import sys, pandas
        from memstream_server.adapters.milvus.pandas_later import pandas_later
        with pandas_later():
            import pymilvus
        from pymilvus.orm import schema
        assert schema.pd is pandas is sys.modules["pandas"]
    """)
