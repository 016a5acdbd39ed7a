package org.pytorch.executorch;

/** Signatures only; see the README of this folder. */
public abstract class Tensor {
    public static Tensor fromBlob(long[] data, long[] shape) {
        throw new UnsupportedOperationException("signatures only");
    }

    public float[] getDataAsFloatArray() {
        throw new UnsupportedOperationException("signatures only");
    }
}
