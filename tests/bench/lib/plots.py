"""Pictures of benchmarks: SVG files that are the same for the same numbers."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def svg(path: pathlib.Path, panels: int = 1, width: float = 7.0) -> Iterator[tuple[Any, Any]]:
  """Yields (figure, axes of the panels) with a light grid, and writes the file at the end."""
  import matplotlib

  matplotlib.use('agg')
  import matplotlib.pyplot as plt

  # Without a salt the names of elements are random; the date would differ, too.
  with plt.rc_context({'svg.hashsalt': path.stem}):
    figure, axes = plt.subplots(
      1, panels, figsize=(width, 4.2), layout='constrained', sharey=True, squeeze=False
    )
    for panel in axes[0]:
      panel.grid(alpha=0.3)
    yield figure, axes[0]
    figure.savefig(path, metadata={'Date': None})
    plt.close(figure)


def available() -> bool:
  """Whether matplotlib is installed: the extra `plot`."""
  try:
    import matplotlib  # noqa: F401
  except ImportError:
    return False
  return True
