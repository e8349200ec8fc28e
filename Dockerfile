# docker build -t fairseq-fastweights . && docker run --rm fairseq-fastweights
FROM python:3.11
RUN apt-get update && apt-get install --yes git make g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /fairseq-fastweights
COPY . .
# PyTorch for CPUs; kernels for every processor, as an image may run on another than its builder's.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu FASTWEIGHTS_BUILD_ISA=all
RUN make setup
CMD ["make", "demo"]
