# The daemon and the command line, without torch: the training library runs in the trainer.
FROM python:3.11-slim AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY client client
COPY ckptd ckptd
RUN pip install --no-cache-dir --prefix=/install -c constraints.txt '.[server,s3,postgresql,otel]'

FROM python:3.11-slim
COPY --from=build /install /usr/local
# Writable for any user, because `docker run --user` must match the owner of a mounted store.
RUN useradd --system --uid 10001 ckptd && install -d -m 1777 /var/lib/ckptd /scrape
USER 10001
ENV CKPTD_HOST=0.0.0.0 \
    CKPTD_DB=sqlite:////var/lib/ckptd/index.db \
    CKPTD_CACHE=/var/lib/ckptd/cache \
    PYTHONDONTWRITEBYTECODE=1
EXPOSE 8470
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8470/readyz', timeout=4)"]
ENTRYPOINT ["ckptd"]
CMD ["serve"]
