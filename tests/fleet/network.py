"""A small TCP proxy before a server's unix socket: a network that can be paused, and whose connections can be cut."""

import asyncio
import contextlib
from pathlib import Path
from typing import Self


class Network:
    def __init__(self, target: Path) -> None:
        self._target = target
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._pipes: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self._flowing.set()
        await self.cut()
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"

    async def pause(self, seconds: float) -> None:
        """Let no byte through for a while, in neither direction; connections stay open."""
        self._flowing.clear()
        await asyncio.sleep(seconds)
        self._flowing.set()

    async def cut(self) -> int:
        """Drop all connections with what is under way on them; return how many."""
        pipes = list(self._pipes)
        for pipe in pipes:
            pipe.cancel()
        await asyncio.gather(*pipes, return_exceptions=True)
        return len(pipes)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._carry(reader, writer))
        self._pipes.add(task)
        task.add_done_callback(self._pipes.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            await self._flowing.wait()
            inner_reader, inner_writer = await asyncio.open_unix_connection(self._target)
            writers.append(inner_writer)
            pipes = [self._pump(reader, inner_writer), self._pump(inner_reader, writer)]
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(pipe) for pipe in pipes]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    task.cancel()
        except (OSError, ExceptionGroup):
            pass
        finally:
            for each in writers:
                each.transport.abort()
            for each in writers:
                with contextlib.suppress(OSError):
                    await each.wait_closed()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._flowing.wait()
            writer.write(data)
            await writer.drain()
