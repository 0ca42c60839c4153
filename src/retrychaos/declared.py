"""What a test declares as part of the world of its jobs, and looks at after a check: ``chaos.files``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from retrychaos.model.errors import LateError, OptionError
from retrychaos.runtime.delivery import Workshop
from retrychaos.world.world import World


class Files:
    """The folders of one test whose files belong to the ledger. Stands for the first, a temporary one, as a path.

    That one is made when it is asked for, and removed with the embedded world. ``files(path)`` declares another folder
    and returns its path.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._declared: list[Path] = []
        self._world: World | None = None

    def __call__(self, path: str | os.PathLike[str]) -> Path:
        """Declare a folder that exists: everything that jobs do below it is seen, and compared.

        Raises OptionError if it is none, or cannot be put back.
        """
        folder = Path(path)
        if self._world is not None:
            raise OptionError(
                f"files({str(path)!r}) came while a check was running: declare folders before the check, so that every "
                "delivery finds the same world."
            )
        if not folder.is_dir():
            what = "is no folder" if folder.exists() else "does not exist"
            raise OptionError(f"files({str(path)!r}): that {what}. Make the folder before you declare it.")
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise OptionError(
                f"files({str(path)!r}): the folder may not be written to, so what a crash leaves there could not be "
                "put back. Declare one that this user may change."
            )
        if folder.resolve() in (Path("/"), Path.home()):
            raise OptionError(f"files({str(path)!r}): a check puts a folder back as it was, and this is too much.")
        if folder not in self._declared:
            self._declared.append(folder)
        return folder

    @property
    def path(self) -> Path:
        """The temporary folder."""
        if self._folder not in self._declared:
            if self._world is not None and self._world.recorder is not None:
                # Functions that the job has looked up by now are the real ones.
                self._world.refuse(LateError("the job asks for chaos.files"))
            self.declare()
        return self._folder

    def declare(self) -> None:
        """Have the temporary folder from now on."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._declared.insert(0, self._folder)

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"<chaos.files {str(self._folder)!r}>"

    def __truediv__(self, name: str | os.PathLike[str]) -> Path:
        return self.path / name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.path, name)

    def furnish(self, world: World, workshop: Workshop) -> None:
        """A check begins: have the declared folders watched."""
        self._world = world
        if not self._declared:
            return
        from retrychaos.world.files import FilesSource

        source = FilesSource(world, map(str, self._declared))
        world.sources.insert(0, source)
        world.settling.append(source.reveal)
        workshop.after.insert(0, source.after_delivery)

    def check_over(self) -> None:
        """Folders may be declared again."""
        self._world = None
