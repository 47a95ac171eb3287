# The image of gateways and of nodes: the base install, which serves environments and has no torch ...
#   docker build --target server --tag rollgym:local .
# ... and, with a compiler for the programs of models, that of servers with a sandbox.
#   docker build --target sandbox --tag rollgym-sandbox:local .
FROM python:3.11-slim-bookworm AS build

RUN python -m venv /opt/build && python -m venv --without-pip /opt/rollgym
WORKDIR /source
# What changes seldom comes first: as long as the locks are the same, only the layers of our own code are built.
COPY requirements-build.lock requirements-server.lock ./
RUN /opt/build/bin/pip install --no-cache-dir --require-hashes --only-binary :all: -r requirements-build.lock \
    && /opt/build/bin/pip --python /opt/rollgym/bin/python install --no-cache-dir --require-hashes \
      --only-binary :all: -r requirements-server.lock
COPY . ./
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels . \
    && /opt/build/bin/pip --python /opt/rollgym/bin/python install --no-cache-dir --no-deps --no-index /wheels/*.whl

FROM python:3.11-slim-bookworm AS server

ENV PATH=/opt/rollgym/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# A new volume takes over the owner of the directory that it is first mounted on: those of tokens, and that of journals.
RUN install --directory --owner 10001 --group 10001 \
      /journals /tokens/gateway /tokens/nodes /tokens/registrar /tokens/prometheus /tokens/sandbox /tokens/trainer
COPY --from=build /opt/rollgym /opt/rollgym
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000
CMD ["roll-serve"]

FROM server AS sandbox

USER root
RUN command -v g++ > /dev/null \
    || (apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*)
# Images of Python come without compiled modules, and no program could keep those that it compiles.
RUN python3 -m compileall -q "$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" -x 'test|idlelib|lib2to3'
USER 10001:10001
