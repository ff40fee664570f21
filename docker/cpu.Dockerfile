# Halocline without an accelerator: every op on its reference. Build from the root of the repository:
#   docker build -f docker/cpu.Dockerfile -t halocline:cpu .
ARG BASE=python:3.12.13-slim-bookworm@sha256:8a7e7cc04fd3e2bd787f7f24e22d5d119aa590d429b50c95dfe12b3abe52f48b

# ---- the wheel of Halocline --------------------------------------------------------------------------------------
FROM ${BASE} AS wheel
WORKDIR /src
RUN python -m venv /opt/build
COPY constraints/tested.txt constraints/
RUN /opt/build/bin/python -m pip install --no-cache-dir -c constraints/tested.txt build setuptools
COPY . .
RUN /opt/build/bin/python -m build --wheel --no-isolation --outdir /wheels .

# ---- everything that is installed --------------------------------------------------------------------------------
FROM ${BASE} AS install
# PyPI's own Linux build of torch carries CUDA; this index has the one without. Another mirror of it will do.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints/cpu.txt constraints/tested.txt /opt/halocline/constraints/
ENV PATH=/opt/halocline/bin:${PATH} \
    PIP_CONSTRAINT=/opt/halocline/constraints/cpu.txt \
    PIP_DISABLE_PIP_VERSION_CHECK=1
# The constraints pin the version of torch.
# hadolint ignore=DL3013
RUN python -m venv /opt/halocline \
    && python -m pip install --no-cache-dir --index-url "${TORCH_INDEX}" torch
COPY --from=wheel /wheels/ /wheels/
RUN python -m pip install --no-cache-dir -c /opt/halocline/constraints/tested.txt /wheels/*.whl
COPY graded/ /opt/halocline/share/halocline/graded/
COPY docker/healthcheck.py /opt/halocline/libexec/healthcheck.py

# ---- the image ---------------------------------------------------------------------------------------------------
FROM ${BASE}
ARG VERSION=unreleased
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Halocline for CPUs" \
      org.opencontainers.image.description="DeepSeek-V4 inference: the reference in torch, without an accelerator" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="docker.io/library/python:3.12.13-slim-bookworm"
COPY --from=install /opt/halocline/ /opt/halocline/
# One volume holds what is compiled or cached; the rest of the image may be read-only.
RUN install -d -o 10001 -g 10001 /cache
# With the constraint, no later `pip install` swaps torch.
ENV PATH=/opt/halocline/bin:${PATH} \
    PIP_CONSTRAINT=/opt/halocline/constraints/cpu.txt \
    HOME=/cache \
    XDG_CACHE_HOME=/cache \
    HALOCLINE_CACHE_DIR=/cache/halocline \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
VOLUME ["/cache"]
WORKDIR /cache
EXPOSE 8000
USER 10001:10001
RUN python -m pip check \
    && halocline doctor --image --constraints /opt/halocline/constraints/cpu.txt
# The first SIGTERM drains, the second stops; give it time with `docker stop --time`.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "/opt/halocline/libexec/healthcheck.py"]
ENTRYPOINT ["halocline"]
CMD ["--help"]
