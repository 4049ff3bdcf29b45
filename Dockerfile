# syntax=docker/dockerfile:1
# The commands of replaydb: by default the web UI; also `db upgrade`, `metrics serve` and others.
#
#     docker build --tag replaydb .
#     docker run --env REPLAYDB_URL --env REPLAYDB_UI_TOKEN --publish 127.0.0.1:8765:8765 replaydb
#     docker run --env REPLAYDB_URL replaydb db upgrade
FROM python:3.13-slim AS build
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM python:3.13-slim
# An index with builds of torch without CUDA, which are several gigabytes smaller.
ARG PIP_EXTRA_INDEX_URL
RUN --mount=from=build,source=/dist,target=/dist \
    --mount=source=constraints.txt,target=/constraints.txt \
    wheel=$(ls /dist/*.whl) \
    && pip install --no-cache-dir --constraint /constraints.txt "${wheel}[obstore,prometheus,ui,zstd]"
# A number, so that Kubernetes can check `runAsNonRoot`.
RUN useradd --uid 1000 --create-home replaydb
USER 1000
WORKDIR /home/replaydb
ENV PYTHONUNBUFFERED=1
EXPOSE 8765 9478
# Of the web UI: the only files that it serves without the token.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8765/static/ui.css', timeout=4)"]
ENTRYPOINT ["replaydb"]
CMD ["ui", "--host", "0.0.0.0"]
