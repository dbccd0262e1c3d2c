# docker build -t tridentlm .                          with CUDA kernels
# docker build -t tridentlm --build-arg EXTRAS= .      without
# docker run --gpus all --shm-size 1g -p 8000:8000 -v tridentlm:/cache --stop-timeout 40 tridentlm
FROM nvcr.io/nvidia/tritonserver:26.05-py3
ARG EXTRAS=[cuda]
ENV PIP_NO_CACHE_DIR=1 PIP_BREAK_SYSTEM_PACKAGES=1
COPY . /src
RUN python3 -m pip install "/src${EXTRAS}"
RUN useradd --create-home tridentlm && install --directory --owner=tridentlm /cache
USER tridentlm
ENV TRIDENTLM_CACHE=/cache/tridentlm HF_HOME=/cache/huggingface FLASHINFER_WORKSPACE_BASE=/cache
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m CMD ["python3", "-c", \
    "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health/ready', timeout=4)"]
ENTRYPOINT ["tridentlm"]
CMD ["serve", "--host", "0.0.0.0"]
