plugins {
    alias(libs.plugins.kotlin.jvm)
}

kotlin {
    jvmToolchain(17)
}

dependencies {
    testImplementation(libs.junit)
}

tasks.test {
    systemProperty("vectors", rootDir.resolve("../runtime_tests/vectors").path)
}
