# A spesd peer: one container per GPU, everything it keeps in one volume.
#   docker build -t spesd .                              for the CPU
#   docker build -t spesd --build-arg COMPUTE=cu128 .    for CUDA 12.8 (any index of PyTorch's)
FROM python:3.11-slim AS build
ARG COMPUTE=cpu
ARG TORCH=torch==2.13.0
RUN python -m venv /opt/spesd
ENV PATH=/opt/spesd/bin:$PATH
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/${COMPUTE} "${TORCH}"
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY peers/profiles ./peers/profiles
COPY spesd ./spesd
RUN pip install --no-cache-dir .

FROM python:3.11-slim
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin spesd \
    && install -d -o spesd -g spesd -m 0700 /var/lib/spesd
COPY --from=build /opt/spesd /opt/spesd
ENV PATH=/opt/spesd/bin:$PATH SPESD_HOME=/var/lib/spesd
USER spesd
VOLUME /var/lib/spesd
EXPOSE 4001/tcp
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=60s --timeout=15s --start-period=300s --retries=3 \
    CMD ["spesd", "status", "--home", "/var/lib/spesd"]
ENTRYPOINT ["spesd"]
