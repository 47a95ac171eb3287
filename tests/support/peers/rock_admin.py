"""ROCK's GEM API without Ray and Docker: the port of its sandbox server, and the port to serve on.

The routes, the request models, the client of sandboxes and (in a process of its own) the sandbox server with GEM's
environments in it are ROCK's. What ROCK's `GemManager` does, which is to start a container for each environment and to
find it again by Ray, is left out: all environments live in the one sandbox server.
"""

import sys
import types
import uuid

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from rock.actions import EnvMakeRequest
from rock.common.exception import request_validation_exception_handler
from rock.sandbox.remote_sandbox import RemoteSandboxRuntime


class GemManager:
    """Passes calls on to a sandbox server, as ROCK's actors do."""

    def __init__(self, port: int) -> None:
        self._runtime = RemoteSandboxRuntime(host="http://127.0.0.1", port=port, timeout=60)

    async def env_make(self, env_id):
        request = EnvMakeRequest(env_id=env_id, sandbox_id=uuid.uuid4().hex)
        return await self._runtime.env_make(request)

    async def env_step(self, request):
        return await self._runtime.env_step(request)

    async def env_reset(self, request):
        return await self._runtime.env_reset(request)

    async def env_close(self, request):
        return await self._runtime.env_close(request)

    async def env_list(self, sandbox_id):
        return await self._runtime.env_list()


async def say_what_failed(request: Request, error: Exception) -> JSONResponse:
    """As ROCK's admin answers any exception."""
    return JSONResponse(status_code=500, content={"detail": str(error), "traceback": []})


if __name__ == "__main__":
    # The routes name the class, whose own module imports Ray.
    sys.modules["rock.sandbox.gem_manager"] = types.ModuleType("rock.sandbox.gem_manager")
    sys.modules["rock.sandbox.gem_manager"].GemManager = GemManager
    from rock.admin.gem.api import gem_router, set_env_service

    set_env_service(GemManager(int(sys.argv[1])))
    app = FastAPI()
    app.add_exception_handler(RequestValidationError, request_validation_exception_handler)
    app.add_exception_handler(Exception, say_what_failed)
    app.include_router(gem_router, prefix="/apis/v1/envs/gem")
    uvicorn.run(app, port=int(sys.argv[2]), log_level="critical")
