# The image of gateways and of nodes: the base install, which serves environments and has no torch.
#   docker build --tag rollgym:local .
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

FROM python:3.11-slim-bookworm

ENV PATH=/opt/rollgym/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# A new volume takes over the owner of the directory that it is first mounted on: those of tokens, and that of journals.
RUN install --directory --owner 10001 --group 10001 \
      /journals /tokens/gateway /tokens/nodes /tokens/registrar /tokens/prometheus /tokens/trainer
COPY --from=build /opt/rollgym /opt/rollgym
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000
CMD ["roll-serve"]
