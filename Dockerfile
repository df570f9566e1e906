# The image of router and replica pods. Build with the CPU or the CUDA torch that pip resolves.
# The compiled CPU path is built for every instruction set first, so the image needs no compiler.
FROM python:3.11-slim AS native
RUN apt-get update && apt-get install -y --no-install-recommends g++
COPY kernels/native /src/kernels/native
RUN cd /src && python kernels/native/build.py /native

FROM python:3.11-slim
WORKDIR /opt/banyan
COPY pyproject.toml README.md LICENSE ./
COPY seams seams
COPY kernels kernels
COPY kvstore kvstore
COPY worker worker
COPY router router
COPY loadtest loadtest
COPY simulate simulate
COPY banyan banyan
RUN pip install --no-cache-dir . && useradd --uid 1000 banyan
COPY --from=native /native /opt/banyan/native
ENV BANYAN_NATIVE=/opt/banyan/native
USER 1000
