# The daemon and the command line, without torch: the training library runs in the trainer.
# The same base for ever: --build-arg BASE=python:3.13-slim@sha256:..., with the digest that
# `docker buildx imagetools inspect python:3.13-slim` prints.
ARG PYTHON=3.13
ARG BASE=python:${PYTHON}-slim

FROM ${BASE} AS build
WORKDIR /src
COPY pyproject.toml hatch_build.py constraints.txt README.md LICENSE ./
COPY client client
COPY ckptd ckptd
RUN pip install --no-cache-dir --prefix=/install -c constraints.txt '.[server,s3,gcs,azure,postgresql,otel]'

FROM ${BASE}
ARG BASE
ARG VERSION=0.1.0
# --build-arg REVISION=$(git rev-parse HEAD)
ARG REVISION=unknown
LABEL org.opencontainers.image.title="ckptd" \
    org.opencontainers.image.description="Checkpoint daemon for PyTorch training" \
    org.opencontainers.image.source="https://github.com/ckptd/ckptd" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}" \
    org.opencontainers.image.base.name="${BASE}"
COPY --from=build /install /usr/local
# Writable for any user, because `docker run --user` must match the owner of a mounted store.
RUN useradd --system --uid 10001 ckptd && install -d -m 1777 /var/lib/ckptd /scrape
USER 10001
ENV CKPTD_HOST=0.0.0.0 \
    CKPTD_DB=sqlite:////var/lib/ckptd/index.db \
    CKPTD_CACHE=/var/lib/ckptd/cache \
    PYTHONDONTWRITEBYTECODE=1
EXPOSE 8470
# As the daemon listens: CKPTD_PORT, and https with CKPTD_TLS_CERT, whose names need not include 127.0.0.1. A process of
# ckptctl would take longer than the request.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
    CMD ["python", "-c", "import os, ssl, urllib.request; e = os.environ; tls = bool(e.get('CKPTD_TLS_CERT')); urllib.request.urlopen(f\"http{'s' * tls}://127.0.0.1:{e.get('CKPTD_PORT', 8470)}/readyz\", timeout=4, context=ssl._create_unverified_context() if tls else None)"]
ENTRYPOINT ["ckptd"]
CMD ["serve"]
