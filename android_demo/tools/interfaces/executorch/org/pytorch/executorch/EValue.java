package org.pytorch.executorch;

/** Signatures only; see the README of this folder. */
public class EValue {
    public static EValue from(Tensor value) {
        throw new UnsupportedOperationException("signatures only");
    }

    public Tensor toTensor() {
        throw new UnsupportedOperationException("signatures only");
    }

    public long toInt() {
        throw new UnsupportedOperationException("signatures only");
    }
}
