# Halocline for NVIDIA sm_90 (H100, H200) with the package set that was run on an H200. Build from the root of the
# repository; no GPU is needed for that. Compiling FlashInfer's modules takes about 10 minutes on two cores.
#   docker build -f docker/cuda.Dockerfile -t halocline:cuda .
ARG BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04@sha256:5dc1bca23d05bd37b011be68ec470c03b403a5da07ec3a86e41af9470e9d0cc6

# ---- the base with its Python; the compiler stays, because DeepGEMM, tilelang and Triton compile on first use ----
FROM ${BASE} AS python
# Ubuntu's archive keeps one version of a package only, so its versions cannot be pinned.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*

# ---- the wheel of Halocline --------------------------------------------------------------------------------------
FROM python AS wheel
WORKDIR /src
RUN python3.12 -m venv /opt/build
COPY constraints/tested.txt constraints/
RUN /opt/build/bin/python -m pip install --no-cache-dir -c constraints/tested.txt build setuptools
COPY . .
RUN /opt/build/bin/python -m build --wheel --no-isolation --outdir /wheels .

# ---- everything that is installed: exactly the recorded versions, by hash, without a resolver --------------------
FROM python AS install
ENV PATH=/opt/halocline/bin:${PATH} \
    PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3.12 -m venv /opt/halocline
WORKDIR /src
COPY constraints/cuda.txt /opt/halocline/constraints/
COPY docker/packages.py docker/trim_wheel.py docker/
COPY docker/metadata/cuda.json docker/metadata/
RUN python docker/packages.py lock cuda > /tmp/lock.txt \
    && grep -v '^sgl-flash-mla==' /tmp/lock.txt > /tmp/resolved.txt \
    && grep '^sgl-flash-mla==' /tmp/lock.txt > /tmp/apart.txt \
    && grep '^sglang-kernel==' /tmp/lock.txt > /tmp/large.txt \
    && grep -v '^sglang-kernel==' /tmp/resolved.txt > /tmp/others.txt
RUN python -m pip install --no-cache-dir --require-hashes --no-deps -r /tmp/others.txt
# 383 MB of FlashAttention 3 and kernels of other architectures shrink to 34 MB on disk.
RUN python -m pip download --no-cache-dir --require-hashes --no-deps -d /tmp/large -r /tmp/large.txt \
    && python docker/trim_wheel.py /tmp/large/sglang_kernel-*.whl /tmp/trimmed \
        --drop 'sgl_kernel/flash_ops*' --drop 'sgl_kernel/infllm_ops*' --drop 'sgl_kernel/sm100/*' \
    && python -m pip install --no-cache-dir --no-deps --no-index /tmp/trimmed/*.whl \
    && rm -rf /tmp/large /tmp/trimmed
COPY --from=wheel /wheels/ /wheels/
# Up to the check nothing may conflict. What follows is the one conflict that constraints/cuda.txt names and explains.
RUN python -m pip install --no-cache-dir --no-deps --no-index /wheels/*.whl \
    && python -m pip check \
    && python -m pip install --no-cache-dir --require-hashes --no-deps -r /tmp/apart.txt
# Its top-k takes minutes to compile, so it must not happen while serving.
COPY docker/prebuild_flashinfer.py docker/
RUN FLASHINFER_CUDA_ARCH_LIST=9.0a FLASHINFER_WORKSPACE_BASE=/tmp/flashinfer \
        python docker/prebuild_flashinfer.py norm mhc topk \
    && rm -rf /tmp/flashinfer
COPY graded/ /opt/halocline/share/halocline/graded/
COPY docker/healthcheck.py /opt/halocline/libexec/healthcheck.py

# ---- the image ---------------------------------------------------------------------------------------------------
FROM python
ARG VERSION=unreleased
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Halocline for NVIDIA" \
      org.opencontainers.image.description="DeepSeek-V4 inference on NVIDIA sm_90" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="docker.io/nvidia/cuda:13.0.2-devel-ubuntu24.04"
COPY --from=install /opt/halocline/ /opt/halocline/
# One volume holds what is compiled or cached; the rest of the image may be read-only.
RUN install -d -o 10001 -g 10001 /cache
# With the constraint, no later `pip install` swaps torch.
ENV PATH=/opt/halocline/bin:${PATH} \
    PIP_CONSTRAINT=/opt/halocline/constraints/cuda.txt \
    CUDA_HOME=/usr/local/cuda \
    HOME=/cache \
    XDG_CACHE_HOME=/cache \
    HALOCLINE_CACHE_DIR=/cache/halocline \
    TRITON_CACHE_DIR=/cache/triton \
    TILELANG_CACHE_DIR=/cache/tilelang \
    DG_JIT_CACHE_DIR=/cache/deep_gemm \
    FLASHINFER_WORKSPACE_BASE=/cache/flashinfer \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
VOLUME ["/cache"]
WORKDIR /cache
EXPOSE 8000
USER 10001:10001
RUN halocline doctor --image --constraints /opt/halocline/constraints/cuda.txt
# The first SIGTERM drains, the second stops; give it time with `docker stop --time`.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python", "/opt/halocline/libexec/healthcheck.py"]
ENTRYPOINT ["halocline"]
CMD ["--help"]
