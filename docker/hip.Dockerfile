# Halocline for AMD MI300X (gfx942) and MI355X (gfx950). Never run on AMD hardware by us. Build from the root of the
# repository; no GPU is needed for that. The base brings torch, triton and aiter for both targets; GPU_TARGET decides
# what is compiled on first use and is checked against the base.
#   docker build -f docker/hip.Dockerfile --build-arg GPU_TARGET=gfx950 -t halocline:gfx950 .
ARG BASE=vllm/vllm-openai-rocm:v0.29.0@sha256:e5e47f6aaab675c252c381f0dac237b31b10d87bb74d092b07fb4065efd7f5a1

# ---- the wheel of Halocline --------------------------------------------------------------------------------------
FROM ${BASE} AS wheel
WORKDIR /src
RUN python3 -m venv /opt/build
COPY constraints/tested.txt constraints/
RUN /opt/build/bin/python -m pip install --no-cache-dir -c constraints/tested.txt build setuptools
COPY . .
RUN /opt/build/bin/python -m build --wheel --no-isolation --outdir /wheels .

# ---- everything that is installed, in an environment of its own on top of the base's packages --------------------
FROM ${BASE} AS install
ARG GPU_TARGET=gfx942
WORKDIR /src
COPY docker/packages.py docker/
COPY docker/metadata/rocm.json docker/metadata/
# What the base has is what must stay: the last step compares, and nothing here resolves dependencies.
RUN mkdir -p /opt/halocline/constraints \
    && python3 docker/packages.py given torch triton amd-aiter amdsmi flydsl > /opt/halocline/constraints/base.txt \
    && python3 -c 'import sys, torch; built = torch._C._cuda_getArchFlags().split(); \
        sys.exit(0 if sys.argv[1] in built else f"torch is built for {built}, not for {sys.argv[1]}")' "${GPU_TARGET}" \
    && python3 -m venv --system-site-packages /opt/halocline
ENV PATH=/opt/halocline/bin:${PATH} \
    PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python docker/packages.py lock rocm > /tmp/lock.txt \
    && python -m pip install --no-cache-dir --require-hashes --no-deps -r /tmp/lock.txt
COPY --from=wheel /wheels/ /wheels/
RUN python -m pip install --no-cache-dir --no-deps --no-index /wheels/*.whl
COPY graded/ /opt/halocline/share/halocline/graded/
COPY docker/healthcheck.py /opt/halocline/libexec/healthcheck.py

# ---- the image ---------------------------------------------------------------------------------------------------
FROM ${BASE}
ARG GPU_TARGET=gfx942
ARG VERSION=unreleased
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Halocline for AMD ${GPU_TARGET}" \
      org.opencontainers.image.description="DeepSeek-V4 inference on AMD; compiled and emulated, never run on AMD" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="docker.io/vllm/vllm-openai-rocm:v0.29.0"
COPY --from=install /opt/halocline/ /opt/halocline/
# One volume holds what is compiled or cached; the rest of the image may be read-only.
RUN install -d -o 10001 -g 10001 /cache
# With the constraint, no later `pip install` swaps torch, triton or aiter. aiter keeps what it compiles below HOME;
# AITER_JIT_DIR would hide the kernels that the base has already compiled.
ENV PATH=/opt/halocline/bin:${PATH} \
    PIP_CONSTRAINT=/opt/halocline/constraints/base.txt \
    ROCM_PATH=/opt/rocm \
    GPU_ARCHS=${GPU_TARGET} \
    PYTORCH_ROCM_ARCH=${GPU_TARGET} \
    HOME=/cache \
    XDG_CACHE_HOME=/cache \
    HALOCLINE_CACHE_DIR=/cache/halocline \
    TRITON_CACHE_DIR=/cache/triton \
    TILELANG_CACHE_DIR=/cache/tilelang \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
VOLUME ["/cache"]
WORKDIR /cache
EXPOSE 8000
USER 10001:10001
# `pip check` would also judge the engine that the base carries and that Halocline never loads; doctor checks, by the
# same rules, all that Halocline reaches, and that torch, triton and aiter are still the base's own.
RUN halocline doctor --image --constraints /opt/halocline/constraints/base.txt
# The first SIGTERM drains, the second stops; give it time with `docker stop --time`.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python", "/opt/halocline/libexec/healthcheck.py"]
ENTRYPOINT ["halocline"]
CMD ["--help"]
