{{- define "prefill-operator.name" -}}
{{- if contains "prefill-operator" .Release.Name -}}
{{ .Release.Name | trunc 53 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-prefill-operator" (.Release.Name | trunc 36 | trimSuffix "-") }}
{{- end -}}
{{- end -}}

{{- define "prefill-operator.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "prefill-operator.selector" -}}
app.kubernetes.io/name: prefill-operator
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "prefill-operator.labels" -}}
app.kubernetes.io/name: prefill-operator
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/part-of: prefill-operator
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- with .Values.extraLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* Whether what Prometheus and Grafana pick up is installed: list of the root context and auto, always or never. */ -}}
{{- define "prefill-operator.monitoring" -}}
{{- $root := index . 0 -}}
{{- $enabled := index . 1 -}}
{{- or (eq $enabled "always") (and (eq $enabled "auto") ($root.Capabilities.APIVersions.Has "monitoring.coreos.com/v1")) -}}
{{- end -}}
