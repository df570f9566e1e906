# The image of router and replica pods. Build with the CPU or the CUDA torch that pip resolves.
FROM python:3.11-slim
WORKDIR /opt/banyan
COPY pyproject.toml README.md LICENSE ./
COPY seams seams
COPY kernels kernels
COPY kvstore kvstore
COPY worker worker
COPY router router
COPY loadtest loadtest
COPY banyan banyan
RUN pip install --no-cache-dir . && useradd --uid 1000 banyan
USER 1000
